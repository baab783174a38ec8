"""Compares a candidate with the serving drafter: lengths, projected speeds, and their noise.

Survival at draft i is the probability that drafts 1 .. i are all accepted. E[len] = 1 + sum of
survivals, including the bonus token. A drafter's speed in rounds of one batch size is the best
ratio over k of E[len] with k drafts to the cost of such a round. The engine's speed is at least
that of the best untrained arm (off or n-grams), since the bandit chooses that arm if the drafter is
slower. The projected speed-up is the mean of the engine's speed over batch sizes, weighted by the
seconds of their rounds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.arm_names import read_arm
from paceline.services.drafter_trainer.config import GateConfig
from paceline.services.drafter_trainer.messages import RoundCosts

Floats = npt.NDArray[np.float64]
RESAMPLES = 200  # of the bootstrap: the standard deviation is exact to 5 %
ONE_SIDED, TWO_SIDED = 1.645, 1.96  # standard errors: 95 %
EARLY = 1.5  # noises of a difference that is decided before all positions are measured


@dataclass(frozen=True, slots=True)
class SizeGroup:
    """Rounds of one batch size with the trained kind of drafter."""

    share: float  # share of the seconds of all rounds
    costs: Mapping[int, float]  # drafts -> cost of a round with them, relative to a round without
    rival: float = 1.0  # speed of the best untrained arm, relative to plain decoding


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of one comparison; lengths include the bonus token (>= 1).

    Noise: half-widths of 95 % intervals.
    """

    candidate: float
    serving: float
    noise: float  # noise of the lengths' paired difference
    positions: int
    candidate_speedup: float
    serving_speedup: float
    speedup_noise: float  # noise of the speed-ups' paired difference
    serving_noise: float  # noise of the serving drafter's length
    survival: tuple[float, ...]  # of the candidate, by draft
    serving_survival: tuple[float, ...]
    # the candidate's gain in a drafter's own speed, without regard to other arms
    gain: float
    gain_noise: float

    @property
    def better(self) -> bool:
        """Whether the candidate is faster, at 95 %.

        If untrained arms are faster than both drafters, the engine's speed is equal with either
        drafter. Then the drafter's own speed decides: a promotion costs nothing, and helps once
        untrained arms are slower again.
        """
        difference = self.candidate_speedup - self.serving_speedup
        one_sided = ONE_SIDED / TWO_SIDED
        if difference > one_sided * self.speedup_noise:
            return True
        return difference >= 0 and self.gain > one_sided * self.gain_noise

    @property
    def decided(self) -> bool:
        """Whether more positions would hardly change the result: the noise is far smaller than the
        difference.
        """
        difference = abs(self.candidate_speedup - self.serving_speedup)
        return difference > EARLY * self.speedup_noise > 0


def judge(
    candidate: Floats,
    serving: Floats,
    groups: npt.NDArray[np.int64],
    size_groups: Sequence[SizeGroup],
    *,
    resamples: int = RESAMPLES,
) -> Judgement:
    """Compares two drafters of one kind by their estimates of survival [N, K] at draft 1 .. K of N
    positions. `groups` [N] is the sibling group of each position.

    Positions of one sequence depend on each other, and sequences of one prompt are similar. So
    whole groups are resampled (paired bootstrap; Efron & Tibshirani 1993, chapter 8).
    """
    count, both = len(np.unique(groups)), (candidate, serving)
    survival = [one.mean(axis=0) for one in both]
    drawn = [_resampled(one, groups, resamples) for one in both]
    lengths = [1.0 + resampled.sum(axis=1) for resampled in drawn]

    def speeds(survivals: Sequence[Floats], *, alone: bool = False) -> list[Floats]:
        return [speedup(each, size_groups, alone=alone) for each in survivals]

    speeds_now, speedups = speeds(survival), speeds(drawn)
    own, own_drawn = speeds(survival, alone=True), speeds(drawn, alone=True)
    return Judgement(
        candidate=1.0 + float(survival[0].sum()),
        serving=1.0 + float(survival[1].sum()),
        noise=_half_width(lengths[0] - lengths[1], count),
        positions=len(candidate),
        candidate_speedup=float(speeds_now[0]),
        serving_speedup=float(speeds_now[1]),
        speedup_noise=_half_width(speedups[0] - speedups[1], count),
        serving_noise=_half_width(lengths[1], count),
        survival=tuple(survival[0].tolist()),
        serving_survival=tuple(survival[1].tolist()),
        gain=float(own[0] / own[1]) - 1,
        gain_noise=_half_width(own_drawn[0] / own_drawn[1], count),
    )


def _resampled(accepted: Floats, groups: npt.NDArray[np.int64], resamples: int) -> Floats:
    """Survivals [resamples, K] of resampled groups, the same groups for every drafter."""
    _, index = np.unique(groups, return_inverse=True)
    sizes = np.bincount(index).astype(np.float64)
    draws = np.random.default_rng(0).integers(0, len(sizes), size=(resamples, len(sizes)))
    sums = np.stack([np.bincount(index, weights=column) for column in accepted.T], axis=1)
    found: Floats = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)[:, None]
    return found


def speedup(survival: Floats, size_groups: Sequence[SizeGroup], *, alone: bool = False) -> Floats:
    """Speed by survival, [..., K] -> [...], relative to plain decoding: of the engine, or `alone`
    of the drafter.
    """
    found: Floats = np.zeros(survival.shape[:-1])
    for one in size_groups:
        speed = _speed(survival, one)
        found = found + one.share * (speed if alone else np.maximum(speed, one.rival))
    return found


def _speed(survival: Floats, size_group: SizeGroup) -> Floats:
    lengths = 1.0 + np.cumsum(survival, axis=-1)
    best: Floats = np.max(
        [lengths[..., drafts - 1] / cost for drafts, cost in size_group.costs.items()], axis=0
    )
    return best


def _half_width(means: Floats, count: int) -> float:
    # One group has no spread between groups, and few groups have too little: a bootstrap has their
    # spread around their own mean.
    return (
        TWO_SIDED * float(means.std()) * math.sqrt(count / (count - 1)) if count > 1 else math.inf
    )


class MeasuredCosts:
    """Costs of chains by batch size and number of drafts, relative to a round without drafts.

    The engine measures its arms, and the coordinator passes the costs on. Until a kind is measured,
    a round with k drafts costs 1 + k (verify_cost + draft_cost), as configured.
    """

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self._measured: Sequence[RoundCosts] = ()

    def update(self, measured: Sequence[RoundCosts]) -> None:
        """Replaces the engine's measurements; an empty list changes nothing."""
        self._measured = measured or self._measured

    def size_groups(self, kind: str) -> tuple[list[SizeGroup], bool]:
        """The size groups of a kind, and whether their costs are measured."""
        known = [(one, self._chains(one.costs, kind)) for one in self._measured]
        known = [(one, costs) for one, costs in known if costs]
        if not known:
            each = self._config.verify_cost + self._config.draft_cost
            drafts = range(1, self._config.draft_steps + 1)
            return [SizeGroup(1.0, {count: 1.0 + count * each for count in drafts})], False
        whole = sum(one.share for one, _ in known) or 1.0
        return [SizeGroup(one.share / whole, costs, one.rival) for one, costs in known], True

    def _chains(self, costs: Mapping[str, float], kind: str) -> dict[int, float]:
        """Costs of a kind's arms by the number of drafts; trees are left out."""
        chains: dict[int, float] = {}
        for arm, cost in costs.items():
            name = read_arm(arm)
            if name is None or name.speculator != kind or name.shape.topk != 1 or cost <= 0:
                continue
            if 1 <= name.shape.steps <= self._config.draft_steps:
                chains[name.shape.steps] = cost
        return chains
