"""Notices that the serving drafter suddenly drafts worse: then the tasks have changed."""

from __future__ import annotations

import math


class ServedLength:
    """The serving drafter's acceptance length as it was last judged."""

    def __init__(self) -> None:
        self._last = math.nan
        self._noise = 0.0

    def falls_to(self, length: float, noise: float) -> bool:
        """Takes a judgement in, with the half-width of its 95 % interval; True where the length is
        below the one before by more than the noise of both together.
        """
        fallen = self._last - length > math.hypot(self._noise, noise)  # never of the first
        self._last, self._noise = length, noise
        return fallen
