"""Notices that the serving drafter suddenly drafts worse, by judgements and by rollouts: then the
tasks have changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

FALLEN = 0.8
"""Of the tokens of a drafted round: what tasks and arms of a step make of it differs by less."""
HURRIED = 8
"""Judgements after a fall that do not wait for their optimiser steps."""


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


class Hurry:
    """After a fall of what rollouts accept, candidates are judged by the rows of each policy
    version: one that is only a little better is worth its promotion then, and what is judged once
    in some dozens of optimiser steps comes steps too late.
    """

    def __init__(self) -> None:
        self._lengths: Mapping[str, float] = {}
        self._left = 0
        self._judged_policy = -1

    def rolled_out(self, lengths: Mapping[str, float]) -> None:
        """Takes the tokens of a drafted round by arm in, as the last rollouts had them."""
        both = self._lengths.keys() & lengths.keys()
        ratios = [lengths[arm] / self._lengths[arm] for arm in both]
        if ratios and statistics.geometric_mean(ratios) < FALLEN:
            self._left = HURRIED
        self._lengths = lengths or self._lengths

    @property
    def lasts(self) -> bool:
        """Judgements may come sooner."""
        return self._left > 0

    def due(self, policy_version: int) -> bool:
        """Whether rows of this policy version are to be judged by now."""
        return self.lasts and policy_version > self._judged_policy

    def begun(self, policy_version: int) -> None:
        """A judgement by rows of that version begins."""
        self._judged_policy = policy_version

    def judged(self) -> bool:
        """A judgement has ended; whether it was one of these."""
        lasted = self.lasts
        self._left = max(self._left - 1, 0)
        return lasted
