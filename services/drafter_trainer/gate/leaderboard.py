"""Ranks the kinds of drafters, and records the gate's decisions."""

from __future__ import annotations

from drafter_trainer import messages as m
from drafter_trainer.gate.comparison import Judgement, conditional
from drafter_trainer.gate.evaluate import HeldOut
from drafter_trainer.learn.heads import PolicyHead
from paceline.telemetry import get_logger

log = get_logger("drafter_trainer")


class Leaderboard:
    """Every kind as it was last judged."""

    def __init__(self) -> None:
        self._contenders: dict[str, m.LeaderboardEntry] = {}

    def place(
        self,
        kind: str,
        judgement: Judgement,
        *,
        optimizer_steps: int,
        policy_version: int,
        servable: bool,
    ) -> None:
        """Takes the place of the kind's last entry."""
        self._contenders[kind] = m.LeaderboardEntry(
            kind=kind,
            accept_length=judgement.candidate,
            noise=judgement.noise,
            speedup=judgement.candidate_speedup,
            optimizer_steps=optimizer_steps,
            policy_version=policy_version,
            servable=servable,
        )

    @property
    def ranked(self) -> list[m.LeaderboardEntry]:
        """Best projected speed-up first."""
        return sorted(self._contenders.values(), key=lambda one: (-one.speedup, one.kind))


def judged(
    kind: str, version: int, judgement: Judgement, head: PolicyHead, *, heldout: HeldOut, index: int
) -> m.Judged:
    """The record of a candidate that was kept; `index` is its place in `heldout`."""
    return m.Judged(
        epoch=0,
        decision="kept",
        kind=kind,
        drafter_version=version,
        candidate=judgement.candidate,
        serving=judgement.serving,
        noise=judgement.noise,
        candidate_speedup=judgement.candidate_speedup,
        serving_speedup=judgement.serving_speedup,
        speedup_noise=judgement.speedup_noise,
        policy_version=head.policy_version,
        positions=judgement.positions,
        lm_head_hash=head.hash,
        survival=list(judgement.survival),
        conditional=list(conditional(judgement.survival)),
        serving_survival=list(judgement.serving_survival),
        lengths_by_bucket=heldout.lengths_by_bucket(index),
    )


def reopened(kind: str, version: int, itself: Judgement, head: PolicyHead) -> m.Judged:
    """The record of the serving drafter that has fallen while training was frozen."""
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
        serving_survival=list(itself.serving_survival),
    )


def log_decision(decision: m.Judged) -> None:
    """One line with the numbers that matter."""
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
        leaderboard=[
            f"{one.kind} {one.accept_length:.2f} x{one.speedup:.2f}" for one in decision.leaderboard
        ],
    )
