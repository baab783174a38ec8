"""Compares a candidate with the serving drafter: lengths, projected speeds, and their noise.

Survival at draft i is the probability that drafts 1 .. i are all accepted; E[len] = 1 + sum of
survivals counts the bonus token. A drafter's speed in rounds of one batch size is E[len] up to k
drafts over the cost of such a round, best k; what the engine gets of it is at least the speed of
the best arm that is not trained, off or n-grams, which the bandit takes where the drafter is
slower. The projected speed-up is the mean of that over batch sizes, by the seconds that rounds of
each have taken.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.arm_names import read_arm
from paceline.services.drafter_trainer.config import GateConfig
from paceline.services.drafter_trainer.messages import RoundCosts

Floats = npt.NDArray[np.float64]
RESAMPLES = 200  # of the bootstrap: they know the standard deviation to 5 %
ONE_SIDED, TWO_SIDED = 1.645, 1.96  # standard errors: 95 %
EARLY = 1.5  # noises that a difference has to have to be decided before all positions are measured


@dataclass(frozen=True, slots=True)
class SizeGroup:
    """Rounds of one batch size, as one kind of drafter meets them."""

    share: float  # of the seconds of all rounds
    costs: Mapping[int, float]  # drafts -> cost of a round with them, relative to one without
    rival: float = 1.0  # speed of the best arm that is not trained, plain decoding being 1


@dataclass(frozen=True, slots=True)
class Chain:
    """One drafter at N judged positions."""

    kind: str  # name of the speculator
    accepted: Floats  # [N, K] estimates of survival at draft 1 .. K
    size_groups: Sequence[SizeGroup]


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
    # share of a drafter's own speed, whatever else the engine could do, that the candidate adds
    gain: float
    gain_noise: float

    @property
    def better(self) -> bool:
        """Faster, at 95 %. Where arms that are not trained are faster than both, the engine is as
        fast with either, and the drafter that is faster by itself is: it costs nothing, and is
        there when those arms no longer suffice.
        """
        difference = self.candidate_speedup - self.serving_speedup
        one_sided = ONE_SIDED / TWO_SIDED
        if difference > one_sided * self.speedup_noise:
            return True
        return difference >= 0 and self.gain > one_sided * self.gain_noise

    @property
    def decided(self) -> bool:
        """Whether more positions would hardly change what is better: the noise is far smaller than
        the difference.
        """
        difference = abs(self.candidate_speedup - self.serving_speedup)
        return difference > EARLY * self.speedup_noise > 0


def judge(
    candidate: Chain,
    serving: Chain,
    groups: npt.NDArray[np.int64],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Judgement:
    """Compares two drafters position by position; `groups` [N] is the group of siblings each
    position belongs to.

    Positions of one sequence depend on each other, and sequences of one prompt say nearly the
    same, so whole groups are resampled (paired bootstrap; Efron & Tibshirani 1993, chapter 8).
    """
    count = len(np.unique(groups))
    survival = [one.accepted.mean(axis=0) for one in (candidate, serving)]
    drawn = [_resampled(one, groups, resamples, seed) for one in (candidate, serving)]
    lengths = [1.0 + resampled.sum(axis=1) for resampled in drawn]
    speedups = [
        speedup(resampled, one.size_groups)
        for resampled, one in zip(drawn, (candidate, serving), strict=True)
    ]
    sizes_of = (candidate.size_groups, serving.size_groups)
    own, own_drawn = (list(map(own_speed, of, sizes_of)) for of in (survival, drawn))
    return Judgement(
        candidate=1.0 + float(survival[0].sum()),
        serving=1.0 + float(survival[1].sum()),
        noise=_half_width(lengths[0] - lengths[1], count),
        positions=len(candidate.accepted),
        candidate_speedup=float(speedup(survival[0], candidate.size_groups)),
        serving_speedup=float(speedup(survival[1], serving.size_groups)),
        speedup_noise=_half_width(speedups[0] - speedups[1], count),
        serving_noise=_half_width(lengths[1], count),
        survival=tuple(survival[0].tolist()),
        serving_survival=tuple(survival[1].tolist()),
        gain=float(own[0] / own[1]) - 1,
        gain_noise=_half_width(own_drawn[0] / own_drawn[1], count),
    )


def _resampled(chain: Chain, groups: npt.NDArray[np.int64], resamples: int, seed: int) -> Floats:
    """Survivals [resamples, K] of as many groups, drawn anew; the same ones for each chain."""
    _, index = np.unique(groups, return_inverse=True)
    sizes = np.bincount(index).astype(np.float64)
    draws = np.random.default_rng(seed).integers(0, len(sizes), size=(resamples, len(sizes)))
    sums = np.stack([np.bincount(index, weights=column) for column in chain.accepted.T], axis=1)
    found: Floats = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)[:, None]
    return found


def speedup(survival: Floats, size_groups: Sequence[SizeGroup]) -> Floats:
    """[..., K] survival -> [...] speed that the engine gets, plain decoding being 1."""
    parts = [one.share * np.maximum(_speed(survival, one), one.rival) for one in size_groups]
    whole: Floats = np.sum(parts, axis=0)
    return whole


def own_speed(survival: Floats, size_groups: Sequence[SizeGroup]) -> Floats:
    """The same of the drafter alone."""
    whole: Floats = np.sum([one.share * _speed(survival, one) for one in size_groups], axis=0)
    return whole


def _speed(survival: Floats, size_group: SizeGroup) -> Floats:
    lengths = 1.0 + np.cumsum(survival, axis=-1)
    best: Floats = np.max(
        [lengths[..., drafts - 1] / cost for drafts, cost in size_group.costs.items()], axis=0
    )
    return best


def _half_width(means: Floats, count: int) -> float:
    # One group says nothing about how groups differ, and few say too little: a bootstrap has their
    # spread around their own mean.
    return (
        TWO_SIDED * float(means.std()) * math.sqrt(count / (count - 1)) if count > 1 else math.inf
    )


class MeasuredCosts:
    """Costs of chains by batch size, kind and number of drafts, relative to a round without drafts.

    The engine measures its arms; the coordinator hands them over. Until it has measured all kinds
    that are compared, a round with k drafts costs 1 + k (verify_cost + draft_cost), as configured:
    kinds are compared on one footing.
    """

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self._measured: Sequence[RoundCosts] = ()

    def take(self, measured: Sequence[RoundCosts]) -> None:
        """What the engine has measured; an empty list leaves what is known."""
        self._measured = measured or self._measured

    def size_groups(self, kinds: Collection[str]) -> tuple[dict[str, list[SizeGroup]], bool]:
        """What each kind meets, and whether that is measured."""
        found: dict[str, list[SizeGroup]] = {kind: [] for kind in kinds}
        for one in self._measured:
            costs = self._chains(one.costs)
            if all(kind in costs for kind in kinds):
                for kind in kinds:
                    found[kind].append(SizeGroup(one.share, costs[kind], one.rival))
        if not all(found.values()):
            return {kind: [SizeGroup(1.0, self._configured())] for kind in kinds}, False
        return {kind: _normalised(own) for kind, own in found.items()}, True

    def _chains(self, costs: Mapping[str, float]) -> dict[str, dict[int, float]]:
        """By kind and number of drafts; trees are no chains and left out."""
        chains: dict[str, dict[int, float]] = {}
        for arm, cost in costs.items():
            name = read_arm(arm)
            if name is None or name.shape.topk != 1 or cost <= 0:
                continue
            if 1 <= name.shape.steps <= self._config.draft_steps:
                chains.setdefault(name.speculator, {})[name.shape.steps] = cost
        return chains

    def _configured(self) -> dict[int, float]:
        each = self._config.verify_cost + self._config.draft_cost
        return {drafts: 1.0 + drafts * each for drafts in range(1, self._config.draft_steps + 1)}


def _normalised(size_groups: Sequence[SizeGroup]) -> list[SizeGroup]:
    whole = sum(one.share for one in size_groups) or 1.0
    return [SizeGroup(one.share / whole, one.costs, one.rival) for one in size_groups]
