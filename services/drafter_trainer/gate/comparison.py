"""Compares a candidate with the serving drafter: lengths, projected speed-ups, and their noise.

Survival at draft i is the probability that drafts 1 .. i are all accepted; E[len] = 1 + sum of
survivals counts the bonus token. The projected speed-up is E[len] up to k drafts over the cost of
such a round, best k.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter_trainer.config import GateConfig
from paceline.arm_names import read_arm

Floats = npt.NDArray[np.float64]
RESAMPLES = 200  # of the bootstrap: they know the standard deviation to 5 %


@dataclass(frozen=True, slots=True)
class Chain:
    """One drafter at N held-out positions."""

    kind: str  # name of the speculator
    accepted: Floats  # [N, K] estimates of survival at draft 1 .. K
    costs: Mapping[int, float]  # drafts -> cost of a round with them, relative to a round without


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outcome of one comparison; lengths count the bonus token (>= 1).

    Noise: half-widths of 95 % intervals.
    """

    candidate: float
    serving: float
    noise: float  # of the paired difference of the lengths
    positions: int
    candidate_speedup: float
    serving_speedup: float
    speedup_noise: float  # of the paired difference of the speed-ups
    serving_noise: float  # of the serving drafter's length by itself
    survival: tuple[float, ...]  # of the candidate, by draft
    serving_survival: tuple[float, ...]
    same_kind: bool

    @property
    def better(self) -> bool:
        """Better by more than the noise: in length within a kind, where costs are equal, else in
        speed-up.
        """
        if self.same_kind:
            return self.candidate - self.serving > self.noise
        return self.candidate_speedup - self.serving_speedup > self.speedup_noise

    @property
    def gain(self) -> float:
        """Share of speed that serving the candidate would add."""
        return self.candidate_speedup / self.serving_speedup - 1


def conditional(survival: tuple[float, ...]) -> tuple[float, ...]:
    """Acceptance of draft i where all before it were accepted; 0 where that never happened."""
    before = (1.0, *survival[:-1])
    return tuple(
        now / earlier if earlier > 0 else 0.0 for now, earlier in zip(survival, before, strict=True)
    )


def judge(
    candidate: Chain,
    serving: Chain,
    documents: npt.NDArray[np.int64],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Judgement:
    """Compares two drafters position by position; `documents` [N] is the sequence each position
    belongs to.

    Positions of one sequence depend on each other, so whole sequences are resampled (paired
    bootstrap; Efron & Tibshirani 1993, chapter 8).
    """
    _, index = np.unique(documents, return_inverse=True)
    sizes = np.bincount(index).astype(np.float64)
    draws = np.random.default_rng(seed).integers(0, len(sizes), size=(resamples, len(sizes)))
    weights = sizes[draws].sum(axis=1)[:, None]
    drawn, survival = [], []
    for one in (candidate, serving):
        sums = np.stack([np.bincount(index, weights=column) for column in one.accepted.T], axis=1)
        drawn.append(sums[draws].sum(axis=1) / weights)  # [resamples, K]
        survival.append(one.accepted.mean(axis=0))

    lengths = [1.0 + resampled.sum(axis=1) for resampled in drawn]
    speedups = [
        speedup(resampled, one.costs)
        for resampled, one in zip(drawn, (candidate, serving), strict=True)
    ]
    several = len(sizes) > 1
    return Judgement(
        candidate=1.0 + float(survival[0].sum()),
        serving=1.0 + float(survival[1].sum()),
        noise=_half_width(lengths[0] - lengths[1], several),
        positions=len(candidate.accepted),
        candidate_speedup=float(speedup(survival[0], candidate.costs)),
        serving_speedup=float(speedup(survival[1], serving.costs)),
        speedup_noise=_half_width(speedups[0] - speedups[1], several),
        serving_noise=_half_width(lengths[1], several),
        survival=tuple(survival[0].tolist()),
        serving_survival=tuple(survival[1].tolist()),
        same_kind=candidate.kind == serving.kind,
    )


def speedup(survival: Floats, costs: Mapping[int, float]) -> Floats:
    """[..., K] survival -> [...] tokens per cost of the best number of drafts, plain decoding being
    1.
    """
    lengths = 1.0 + np.cumsum(survival, axis=-1)
    best: Floats = np.max(
        [lengths[..., drafts - 1] / cost for drafts, cost in costs.items()], axis=0
    )
    return best


def _half_width(means: Floats, several: bool) -> float:
    # One sequence says nothing about how sequences differ.
    return 1.96 * float(means.std()) if several else math.inf


class RoundCosts:
    """Costs of chains by kind and number of drafts, relative to a round without drafts.

    The engine measures its arms; the coordinator hands them over. Kinds that it has not measured
    cost 1 + k (verify_cost + draft_cost) for k drafts, as configured.
    """

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self._measured: dict[str, dict[int, float]] = {}

    def take(self, round_costs: Mapping[str, float]) -> None:
        """What the engine has measured, by arm ("eagle:3_1_4"); trees are no chains and left
        out.
        """
        for arm, cost in round_costs.items():
            found = read_arm(arm)
            if found is None or found.shape.topk != 1 or cost <= 0:
                continue
            if 1 <= found.shape.steps <= self._config.draft_steps:
                self._measured.setdefault(found.speculator, {})[found.shape.steps] = cost

    def table(self, kinds: Collection[str]) -> tuple[dict[str, dict[int, float]], bool]:
        """Costs of every kind by number of drafts, and whether they are measured.

        Measured only where all kinds are: two kinds are compared on one footing.
        """
        if kinds and all(kind in self._measured for kind in kinds):
            return {kind: dict(self._measured[kind]) for kind in kinds}, True
        return {kind: self._configured(kind) for kind in kinds}, False

    def _configured(self, kind: str) -> dict[int, float]:
        each = self._config.verify_cost + self._config.draft_cost.get(
            kind, self._config.other_draft_cost
        )
        return {drafts: 1.0 + drafts * each for drafts in range(1, self._config.draft_steps + 1)}
