"""Records the drafter trainer's metrics (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from drafter_trainer.messages import Judged
from paceline.telemetry import meter, span

if TYPE_CHECKING:  # the parent of the ranks imports no torch
    from drafter_trainer.learn.learner import MicroResult


class TrainerMetrics:
    """What rank 0 learns and judges."""

    def __init__(self) -> None:
        made = meter()
        self._positions = made.create_counter("paceline.drafter.positions", unit="{position}")
        self._samples = made.create_counter("paceline.drafter.samples", unit="{sample}")
        self._steps = made.create_counter("paceline.drafter.steps", unit="{step}")
        self._loss = made.create_gauge("paceline.drafter.loss")
        self._length = made.create_gauge("paceline.drafter.accept_length", unit="{token}")
        self._speedup = made.create_gauge("paceline.drafter.projected_speedup")
        self._survival = made.create_gauge("paceline.drafter.survival")
        self._conditional = made.create_gauge("paceline.drafter.conditional_acceptance")
        self._policy_version = made.create_gauge("paceline.drafter.judged_policy_version")
        self._decisions = made.create_counter("paceline.drafter.decisions", unit="{decision}")

    def learned(self, kind: str, result: MicroResult, *, samples: int) -> None:
        """One micro-batch of rank 0; `samples` are those of all ranks."""
        where = {"drafter": kind}
        self._positions.add(result.positions, where)
        self._samples.add(samples, where)
        self._steps.add(int(result.stepped), where)
        for term, value in {"total": result.loss, **result.terms}.items():
            self._loss.set(value, {**where, "term": term})

    def judged(self, decision: Judged) -> None:
        """One decision of the gate."""
        self._decisions.add(1, {"drafter": decision.kind, "decision": decision.decision})
        if decision.decision in (
            "frozen",
            "rolled_back",
        ):  # the numbers of another decision, counted there
            return
        # The policy version is a value, not a label: a label would make new series at every RL
        # step.
        where: dict[str, str | float] = {
            "drafter": decision.kind,
            "temperature": decision.temperature,
        }
        self._policy_version.set(decision.policy_version, {"drafter": decision.kind})
        if decision.candidate:
            sides = {"candidate": decision.survival, "serving": decision.serving_survival}
            self._length.set(decision.candidate, {**where, "role": "candidate", "bucket": "all"})
            self._speedup.set(decision.candidate_speedup, {**where, "role": "candidate"})
        else:
            sides = {"serving": decision.serving_survival}
        self._length.set(decision.serving, {**where, "role": "serving", "bucket": "all"})
        self._speedup.set(decision.serving_speedup, {**where, "role": "serving"})
        for bucket, length in decision.lengths_by_bucket.items():
            self._length.set(length, {**where, "role": "candidate", "bucket": bucket})
        for role, survival in sides.items():
            self._by_position({**where, "role": role}, survival)

    def _by_position(self, where: Mapping[str, str | float], survival: list[float]) -> None:
        before = 1.0
        for position, value in enumerate(survival, 1):
            at = {**where, "position": position}
            self._survival.set(value, at)
            self._conditional.set(value / before if before else 0.0, at)
            before = value


class LeaseMetrics:
    """What the parent of the ranks sees of leases."""

    def __init__(self) -> None:
        made = meter()
        self._slot_time = made.create_counter("paceline.drafter.slot_time", unit="s")
        self._preemption = made.create_histogram(
            "paceline.drafter.preemption_latency",
            unit="s",
            explicit_bucket_boundaries_advisory=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
        )

    def held(self, slots: int, seconds: float) -> None:
        """A lease has ended."""
        self._slot_time.add(slots * seconds)

    def preempted(self, seconds: float) -> None:
        """The slots were free so long after the command."""
        self._preemption.record(seconds)


@contextmanager
def micro_step_span(policy_version: int, kind: str) -> Iterator[Callable[[MicroResult], None]]:
    """The span of one micro-batch; call what it gives with the result."""
    with span("drafter.micro_step", policy_version=policy_version, drafter=kind) as current:

        def record(result: MicroResult) -> None:
            current.set_attribute("positions", result.positions)
            current.set_attribute("loss", result.loss)
            current.set_attribute("stepped", result.stepped)

        yield record


@contextmanager
def gate_span(drafter_version: int) -> Iterator[Callable[[Iterable[Judged]], None]]:
    """The span of one piece of a round; call what it gives with the decisions."""
    with span("drafter.gate", drafter_version=drafter_version) as current:

        def record(decisions: Iterable[Judged]) -> None:
            for decision in decisions:
                current.set_attribute("decision", decision.decision)
                current.set_attribute("drafter", decision.kind)

        yield record
