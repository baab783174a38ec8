"""The drafter trainer's metrics and spans. `make docs` writes the metrics into docs/metrics.md."""

from paceline.services.drafter_trainer.messages import Judged
from paceline.telemetry.metrics import Counter, Gauge, Histogram, Labels

DRAFTER = ("drafter",)
JUDGED = ("drafter", "temperature", "role")

POSITIONS = Counter("paceline.drafter.positions", "{position}", DRAFTER)
"""positions of rank 0"""
SAMPLES = Counter("paceline.drafter.samples", "{sample}", DRAFTER)
"""samples of all ranks"""
CHECKPOINTS_DAMAGED = Counter("paceline.drafter.checkpoints_damaged", "{checkpoint}")
"""damaged checkpoints at a start"""
SAMPLES_DROPPED = Counter("paceline.drafter.samples_dropped", "{sample}", ("reason",))
"""captured rows not trained on: evicted (full buffer), unusable or stale_head (no policy head)"""
STEPS = Counter("paceline.drafter.steps", "{step}", DRAFTER)
"""optimiser steps"""
STEPS_SKIPPED = Counter("paceline.drafter.steps_skipped", "{step}", DRAFTER)
"""steps with a gradient that is not finite"""
LOSS = Gauge("paceline.drafter.loss", "1", ("drafter", "term"))
"""mean loss of the last micro-batch, by term"""
ACCEPT_LENGTH = Gauge("paceline.drafter.accept_length", "{token}", JUDGED)
"""E[len] on fresh rows, 1 + all survivals"""
SURVIVAL = Gauge("paceline.drafter.survival", "1", (*JUDGED, "position"))
"""P(drafts 1 to i all accepted)"""
PROJECTED_SPEEDUP = Gauge("paceline.drafter.projected_speedup", "1", JUDGED)
"""projected speed over plain decoding"""
JUDGED_POLICY_VERSION = Gauge("paceline.drafter.judged_policy_version", "1", DRAFTER)
"""policy version of the fresh rows"""
DECISIONS = Counter("paceline.drafter.decisions", "{decision}", ("drafter", "decision"))
"""decisions of the gate"""
SLOT_TIME = Counter("paceline.drafter.slot_time", "s")
"""slot-seconds under leases"""
PREEMPTION_LATENCY = Histogram(
    "paceline.drafter.preemption_latency", "s", (), (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
)
"""time from Preempt to free slots"""


def record_decision(decision: Judged) -> None:
    """Records one decision of the gate."""
    drafter = decision.kind
    DECISIONS.record(drafter=drafter, decision=decision.decision)
    # The decisions frozen and rolled_back repeat the numbers of another decision.
    if decision.decision in ("frozen", "rolled_back"):
        return
    JUDGED_POLICY_VERSION.record(decision.policy_version, drafter=drafter)
    for role, length, speedup, survival in (
        ("candidate", decision.candidate, decision.candidate_speedup, decision.survival),
        ("serving", decision.serving, decision.serving_speedup, decision.serving_survival),
    ):
        if role == "candidate" and not decision.candidate:
            continue
        labels: Labels = {"drafter": drafter, "temperature": decision.temperature, "role": role}
        ACCEPT_LENGTH.record(length, **labels)
        PROJECTED_SPEEDUP.record(speedup, **labels)
        for position, value in enumerate(survival, 1):
            SURVIVAL.record(value, **labels, position=position)
