"""Detects a sudden fall of the serving drafter, from judgements and from rollouts; the tasks have
then changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

FALLEN = 0.8
"""Share of the earlier tokens per drafted round that counts as a fall. Ordinary differences between
steps' tasks and arms are smaller.
"""
HURRIED = 8
"""Judgements after a fall that do not wait for optimiser steps."""


class ServedLength:
    """The serving drafter's acceptance length at its last judgement."""

    def __init__(self) -> None:
        self._last = math.nan
        self._noise = 0.0

    def falls_to(self, length: float, noise: float) -> bool:
        """Records a judgement with the half-width of its 95 % interval. Returns True if the length
        is below the previous one by more than the noise of both.
        """
        fallen = self._last - length > math.hypot(self._noise, noise)  # not the first
        self._last, self._noise = length, noise
        return fallen


class Hurry:
    """After a fall of acceptance in rollouts, candidates are judged by the rows of each policy
    version. A slightly better candidate is then worth its promotion, and a judgement every few
    dozen optimiser steps is too late.
    """

    def __init__(self) -> None:
        self._lengths: Mapping[str, float] = {}
        self._left = 0
        self._judged_policy = -1

    def rolled_out(self, lengths: Mapping[str, float]) -> None:
        """Records the tokens per drafted round by arm of the last rollouts."""
        both = self._lengths.keys() & lengths.keys()
        ratios = [lengths[arm] / self._lengths[arm] for arm in both]
        if ratios and statistics.geometric_mean(ratios) < FALLEN:
            self._left = HURRIED
        self._lengths = lengths or self._lengths

    @property
    def lasts(self) -> bool:
        """Whether judgements may come early."""
        return self._left > 0

    def due(self, policy_version: int) -> bool:
        """Whether rows of this policy version should be judged now."""
        return self.lasts and policy_version > self._judged_policy

    def begun(self, policy_version: int) -> None:
        """Records the start of a judgement by rows of that version."""
        self._judged_policy = policy_version

    def judged(self) -> bool:
        """Records the end of a judgement; returns whether it was an early one."""
        lasted = self.lasts
        self._left = max(self._left - 1, 0)
        return lasted
