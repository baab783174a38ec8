"""Measures the seconds of a piece of work, lap by lap."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import torch


class Stopwatch:
    """Seconds by lap, since the last start and in total."""

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
        """Sum of the laps since the last start."""
        return sum(self.laps.values())


def compute_clock() -> Callable[[], float]:
    """Clock for torch computation with the current number of threads."""
    # With one thread, its CPU time is the cost of a round even while other processes use the core.
    # With more threads, only the wall clock includes the gain of running in parallel.
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
