"""How long a round of each arm takes: the table measured at start, corrected by rounds. Knows no tokens.

    seconds(arm, batch, context) = table(arm, batch, context) x exp(factor(arm, batch-size group))

The table is linear between its batch sizes and contexts and goes on beyond its largest batch size as it ends. An arm that
was not measured has the common shape 1 + batch / SHAPE_ROWS and its first rounds give its level. Factors follow the
log of measured over expected seconds by a clipped moving average, so that a round that took ten times as long moves
them by one clip's share; three in a row on one side beyond the clip are no outliers, and the factor goes there at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollout_gateway.bandits.base import CostSample
from rollout_gateway.engines.evidence import CostEvidence

SHAPE_ROWS = 10.0
CLIP = 0.3  # log seconds beyond which a round is suspected to be an outlier
MOST_ROUNDS = 32.0  # a factor is the mean of about so many rounds
JUMP_ROUNDS = 3  # beyond the clip on one side
PRIOR_ROUNDS = 1.0  # that an arm's other groups are worth to one
PRIMED_ROUNDS = 2.0  # that the table is worth
DOUBT = 0.1  # standard deviation of log seconds that one round leaves
CONTEXT_STEP = 64  # tokens; contexts within one step cost the same
CACHED_AT_MOST = 4096

Floats = npt.NDArray[np.float64]


class CostTable:
    """Seconds of a round by arm, batch size and context."""

    def __init__(self, arms: Sequence[str], groups: Sequence[int], window: int) -> None:
        self._arms = {arm: index for index, arm in enumerate(arms)}
        self._groups = {smallest: index for index, smallest in enumerate(groups)}
        shape = (len(groups), len(arms))
        self._factors, self._weights = np.zeros(shape), np.zeros(shape)
        self._told_factors, self._told_weights = np.zeros(shape), np.zeros(shape)  # by other engines
        self._streaks = np.zeros(shape, dtype=np.int64)  # rounds beyond the clip, signed by their side
        self._keep = 1.0 - 1.0 / window
        self._measured: dict[int, dict[int, tuple[list[int], list[float]]]] = {}  # arm -> context -> sizes, seconds
        self._primed = np.zeros(len(arms), dtype=bool)
        self._tables: dict[tuple[int, int], Floats] = {}
        self._estimates: list[tuple[Floats, Floats] | None] = [None] * len(groups)

    def prime(self, samples: Sequence[CostSample]) -> None:
        """Take a table; of several samples of one place the median counts. Arms not served are left out."""
        places: dict[tuple[int, int, int], list[float]] = {}
        for one in samples:
            if one.arm in self._arms and one.seconds > 0:
                places.setdefault((self._arms[one.arm], one.context, one.batch_size), []).append(one.seconds)
        self._measured = {}
        for (arm, context, size), seconds in sorted(places.items()):
            sizes, values = self._measured.setdefault(arm, {}).setdefault(context, ([], []))
            sizes.append(size)
            values.append(float(np.median(seconds)))
        self._primed[:] = [arm in self._measured for arm in range(len(self._arms))]
        self._tables.clear()
        self._estimates = [None] * len(self._estimates)

    def seconds(self, group: int, batch: int, context: int) -> tuple[Floats, Floats]:
        """Expected seconds [A], NaN for an arm that was never seen, and a factor above 1 for how little is known."""
        factors, doubts = self._estimate(group)
        return np.exp(self._log_table(batch, context) + factors), doubts

    def _estimate(self, group: int) -> tuple[Floats, Floats]:
        known = self._estimates[group]
        if known is None:
            known = self._estimates[group] = self._believe(group)
        return known

    def _believe(self, group: int) -> tuple[Floats, Floats]:
        weights = self._weights + self._told_weights
        sums = self._weights * self._factors + self._told_weights * self._told_factors
        total = weights.sum(axis=0)
        prior = sums.sum(axis=0) / np.where(self._primed, total + PRIMED_ROUNDS, np.where(total > 0, total, 1.0))
        prior = np.where(self._primed | (total > 0), prior, np.nan)
        mean = (sums[group] + PRIOR_ROUNDS * prior) / (weights[group] + PRIOR_ROUNDS)
        rounds = weights[group] + np.where(self._primed, PRIMED_ROUNDS, 0.0)
        return mean, np.exp(DOUBT / np.sqrt(rounds + 0.25))

    def _log_table(self, batch: int, context: int) -> Floats:
        key = (batch, context // CONTEXT_STEP)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= CACHED_AT_MOST:
                self._tables.clear()
            middle = (key[1] + 0.5) * CONTEXT_STEP
            table = np.log([self._interpolated(arm, batch, middle) for arm in range(len(self._arms))])
            self._tables[key] = table
        return table

    def _interpolated(self, arm: int, batch: int, context: float) -> float:
        contexts = self._measured.get(arm)
        if not contexts:
            return 1.0 + batch / SHAPE_ROWS
        at = [_by_batch(sizes, seconds, batch) for sizes, seconds in contexts.values()]
        return float(np.interp(context, list(contexts), at))

    def observe(self, group: int, arm: str, batch: int, context: int, seconds: float) -> None:
        """A round of an arm. One that took no time says nothing."""
        if seconds <= 0:
            return
        index = self._arms[arm]
        level = math.log(seconds) - float(self._log_table(batch, context)[index])
        known, weight = float(self._estimate(group)[0][index]), float(self._weights[group, index])
        factor = float(self._factors[group, index]) if weight >= 1.0 else known
        off = level - factor
        streak = self._count(group, index, off)
        young = weight < JUMP_ROUNDS and not self._primed[index]
        if math.isnan(off) or abs(streak) >= JUMP_ROUNDS or (young and off < -CLIP):
            # Nothing was known, or what was known is past; of the first rounds slow ones are warm-ups.
            factor, weight = level, 0.0
            self._streaks[group, index] = 0
        else:
            factor += max(1.0 / (weight + 1.0), 1.0 / MOST_ROUNDS) * min(max(off, -CLIP), CLIP)
        self._weights[group] *= self._keep
        self._told_weights[group] *= self._keep
        self._factors[group, index] = factor
        self._weights[group, index] = min(weight + 1.0, MOST_ROUNDS)
        self._estimates = [None] * len(self._estimates)

    def _count(self, group: int, index: int, off: float) -> int:
        streak = int(self._streaks[group, index])
        if math.isnan(off) or abs(off) <= CLIP:
            streak = 0
        else:
            side = 1 if off > 0 else -1
            streak = streak + side if streak * side > 0 else side
        self._streaks[group, index] = streak
        return streak

    def snapshot(self) -> tuple[CostEvidence, ...]:
        """What this engine's rounds have shown."""
        return tuple(
            CostEvidence(arm, smallest, float(self._factors[group, index]), float(self._weights[group, index]))
            for smallest, group in self._groups.items()
            for arm, index in self._arms.items()
            if self._weights[group, index] > 0
        )

    def merge(self, evidence: Sequence[CostEvidence]) -> None:
        """What other engines' rounds have shown; arms and groups that are not served here are left out."""
        self._told_factors[:], self._told_weights[:] = 0.0, 0.0
        for one in evidence:
            index, group = self._arms.get(one.arm), self._groups.get(one.batch_group)
            if index is not None and group is not None:
                self._told_factors[group, index] = one.log_factor
                self._told_weights[group, index] = min(one.weight, MOST_ROUNDS)
        self._estimates = [None] * len(self._estimates)


def _by_batch(sizes: list[int], seconds: list[float], batch: int) -> float:
    if batch <= sizes[-1] or len(sizes) < 2:
        return float(np.interp(batch, sizes, seconds))
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[-1] + max(slope, 0.0) * (batch - sizes[-1])
