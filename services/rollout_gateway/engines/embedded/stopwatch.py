"""Measures where the seconds of a piece of work go, lap by lap."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch


class Stopwatch:
    """Seconds by lap: those since the last start, and those of all laps together."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.laps: dict[str, float] = {}
        self.totals: defaultdict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        """Begin the first lap."""
        self.laps = {}
        self._last = self._clock()

    def lap(self, name: str) -> None:
        """End a lap and begin the next one."""
        now = self._clock()
        self.laps[name] = now - self._last
        self.totals[name] += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """Of the laps since the last start."""
        return sum(self.laps.values())


def compute_clock() -> Callable[[], float]:
    """For what torch computes, with the threads that it has now."""
    # One thread's CPU time is what a round costs even while other processes take the core away;
    # with more threads only the wall clock sees how well they ran together.
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
