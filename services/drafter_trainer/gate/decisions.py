"""Records the gate's decisions."""

from __future__ import annotations

from dataclasses import fields

from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.gate.comparison import Judgement
from paceline.services.drafter_trainer.gate.evaluate import MeasuredRows
from paceline.services.drafter_trainer.learn.heads import PolicyHead
from paceline.speculators.shift import conditional
from paceline.telemetry import get_logger

log = get_logger("drafter_trainer")

_FIGURES = {field.name for field in fields(m.Judged)} & {field.name for field in fields(Judgement)}


def judged(
    kind: str,
    version: int,
    judgement: Judgement,
    head: PolicyHead,
    *,
    rows: MeasuredRows,
    index: int,
) -> m.Judged:
    """The record of a kept candidate; `index` is its place in `rows`."""
    return m.Judged(
        epoch=0,
        decision="kept",
        kind=kind,
        drafter_version=version,
        policy_version=head.policy_version,
        lm_head_hash=head.hash,
        conditional=conditional(judgement.survival),
        lengths_by_bucket=rows.lengths_by_bucket(index),
        **{name: getattr(judgement, name) for name in _FIGURES},
    )


def reopened(kind: str, version: int, itself: Judgement, head: PolicyHead) -> m.Judged:
    """The record of a serving drafter that has fallen while training was frozen."""
    return m.Judged(
        epoch=0,
        decision="reopened",
        kind=kind,
        drafter_version=version,
        serving=itself.serving,
        noise=itself.serving_noise,
        serving_speedup=itself.serving_speedup,
        policy_version=head.policy_version,
        positions=itself.positions,
        lm_head_hash=head.hash,
        serving_survival=itself.serving_survival,
    )


def log_decision(decision: m.Judged) -> None:
    """Logs one line with the main numbers."""
    log.info(
        "gate",
        decision=decision.decision,
        drafter=decision.kind,
        drafter_version=decision.drafter_version,
        policy_version=decision.policy_version,
        candidate=decision.candidate,
        serving=decision.serving,
        noise=decision.noise,
        speedups=(decision.candidate_speedup, decision.serving_speedup, decision.speedup_noise),
        positions=decision.positions,
    )
