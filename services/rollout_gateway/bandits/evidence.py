"""What one engine's rounds have shown of its arms, in a form that other engines can add to their
own. Owns no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.trajectory import added

POLICY_TRIALS = 64.0
"""A position's evidence is worth at most this after a new policy."""
LEAST = 1.0
"""Trials, or rounds of cost, below which evidence that fades is dropped."""


@dataclass(frozen=True, slots=True)
class AcceptanceEvidence:
    """Drafts of one family of arms in one batch-size group, discounted."""

    # arms whose drafts at a position are the same: "eagle:1" for chains, the arm's name for a tree
    family: str
    batch_group: int  # smallest batch size of the group
    accepted: tuple[float, ...]  # [K] drafts accepted at position 1 .. K
    trials: tuple[float, ...]  # [K] drafts at that position whose predecessors were all accepted


@dataclass(frozen=True, slots=True)
class CostEvidence:
    """How much longer an arm's rounds take than the table measured at start says, the machine's own
    pace apart.
    """

    arm: str
    batch_group: int
    log_factor: float  # natural logarithm of the factor
    weight: float  # rounds it rests on, discounted


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is shared."""

    acceptance: tuple[AcceptanceEvidence, ...] = ()
    costs: tuple[CostEvidence, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.acceptance or self.costs)


def combine(parts: Iterable[Evidence]) -> Evidence:
    """The evidence of several engines as one: counts add up, factors are averaged by weight."""
    drafts: dict[tuple[str, int], AcceptanceEvidence] = {}
    costs: dict[tuple[str, int], CostEvidence] = {}
    for part in parts:
        for one in part.acceptance:
            key = (one.family, one.batch_group)
            drafts[key] = _added(drafts[key], one) if key in drafts else one
        for cost in part.costs:
            key = (cost.arm, cost.batch_group)
            costs[key] = _averaged(costs[key], cost) if key in costs else cost
    return Evidence(tuple(drafts.values()), tuple(costs.values()))


def bounded(evidence: Evidence, most: float) -> Evidence:
    """The same chances, no position worth more than `most` trials."""

    def cut(one: AcceptanceEvidence) -> AcceptanceEvidence:
        scales = [min(1.0, most / trials) if trials > 0 else 1.0 for trials in one.trials]
        return _scaled(one, scales)

    return replace(evidence, acceptance=tuple(map(cut, evidence.acceptance)))


def faded(evidence: Evidence, share: float) -> Evidence:
    """Worth this share of what it was; what is then worth next to nothing is dropped."""
    drafts = (_scaled(one, [share] * len(one.trials)) for one in evidence.acceptance)
    costs = (replace(one, weight=share * one.weight) for one in evidence.costs)
    return Evidence(
        tuple(one for one in drafts if max(one.trials, default=0.0) >= LEAST),
        tuple(one for one in costs if one.weight >= LEAST),
    )


def _scaled(one: AcceptanceEvidence, scales: Sequence[float]) -> AcceptanceEvidence:
    accepted = tuple(scale * value for scale, value in zip(scales, one.accepted, strict=False))
    trials = tuple(scale * value for scale, value in zip(scales, one.trials, strict=True))
    return replace(one, accepted=accepted, trials=trials)


def _added(first: AcceptanceEvidence, second: AcceptanceEvidence) -> AcceptanceEvidence:
    accepted, trials = added(first.accepted, second.accepted), added(first.trials, second.trials)
    return replace(first, accepted=accepted, trials=trials)


def _averaged(first: CostEvidence, second: CostEvidence) -> CostEvidence:
    weight = first.weight + second.weight
    total = first.weight * first.log_factor + second.weight * second.log_factor
    return CostEvidence(first.arm, first.batch_group, total / weight if weight > 0 else 0.0, weight)


@dataclass(frozen=True, slots=True)
class ArmReport:
    """Statistics of one arm in one batch-size group."""

    arm: str
    batch_group: int
    pulls: int
    explorations: int
    mean_tokens_per_s: float
    mean_accept_length: float
    drafter_deaths: int = 0  # how often its drafter was found dead in this group
