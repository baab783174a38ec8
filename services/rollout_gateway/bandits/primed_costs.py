"""What rounds of each arm took when they were measured at the engine's start. No round corrects it.

Linear between its batch sizes and contexts; it goes on beyond its largest batch size as it ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from paceline.services.rollout_gateway.bandits.base import CostSample

CONTEXT_STEP = 64  # tokens; contexts within one step cost the same
CACHED_AT_MOST = 4096


class PrimedCosts:
    """Seconds of a round by arm, batch size and context, as measured at start."""

    def __init__(self, arms: Sequence[str]) -> None:
        self._arms = {arm: index for index, arm in enumerate(arms)}
        # arm -> context -> sizes, seconds
        self._measured: dict[int, dict[int, tuple[list[int], list[float]]]] = {}
        self._tables: dict[tuple[int, int], list[float]] = {}

    def prime(self, samples: Sequence[CostSample]) -> None:
        """Take a table; of several samples of one place the median counts.

        Arms not served are left out.
        """
        places: dict[tuple[int, int, int], list[float]] = {}
        for one in samples:
            if one.arm in self._arms and one.seconds > 0:
                places.setdefault((self._arms[one.arm], one.context, one.batch_size), []).append(
                    one.seconds
                )

        self._measured = {}
        for (arm, context, size), seconds in sorted(places.items()):
            sizes, values = self._measured.setdefault(arm, {}).setdefault(context, ([], []))
            sizes.append(size)
            values.append(median(seconds))

        self._tables.clear()

    def __contains__(self, arm: int) -> bool:
        """Whether this arm, by its index, was measured."""
        return arm in self._measured

    def seconds(self, batch: int, context: int) -> list[float]:
        """Of a round of each arm [A]; NaN for one that was not measured."""
        key = (batch, context // CONTEXT_STEP)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= CACHED_AT_MOST:
                self._tables.clear()
            middle = (key[1] + 0.5) * CONTEXT_STEP
            table = self._tables[key] = [
                self._interpolated(arm, batch, middle) for arm in range(len(self._arms))
            ]
        return table

    def _interpolated(self, arm: int, batch: int, context: float) -> float:
        contexts = self._measured.get(arm)
        if not contexts:
            return math.nan
        at = [_by_batch(sizes, seconds, batch) for sizes, seconds in contexts.values()]
        return float(np.interp(context, list(contexts), at))


def _by_batch(sizes: list[int], seconds: list[float], batch: int) -> float:
    if batch <= sizes[-1] or len(sizes) < 2:
        return float(np.interp(batch, sizes, seconds))
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[-1] + max(slope, 0.0) * (batch - sizes[-1])
