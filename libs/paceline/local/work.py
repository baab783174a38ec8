"""Measures deadlines of processes by their work.

While processes work, their processor seconds count; while they are idle, wall seconds count. So a
busy machine stretches a deadline by its slowdown. A stopped or deadlocked process misses the
deadline on time. An endless computation misses the deadline too. Every progress report resets the
count.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import psutil

LOOK_S = 1.0
"""Seconds between two readings of processor time."""
_WORKS = 0.01
"""Minimum share of a core for a working process: the kernel counts in ticks of 10 ms."""


class WorkClock:
    """Counted seconds since the last progress of some processes, which may wait for each other."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        """`pids`: returns the current process ids on this host. Without processes, wall seconds
        count.
        """
        self._pids = pids
        self._counted_s = 0.0
        self._used = self._read()
        self._looked_s = time.monotonic()

    def restart(self) -> None:
        """Resets the count after progress."""
        self.look()
        self._counted_s = 0.0

    @property
    def counted_s(self) -> float:
        """Counted seconds up to the last reading, plus wall seconds since then."""
        return self._counted_s + time.monotonic() - self._looked_s

    def look(self) -> float:
        """Adds the time since the last reading and returns the counted seconds."""
        now_s, used = time.monotonic(), self._read()
        passed_s = now_s - self._looked_s
        worked_s = max((used[pid] - self._used.get(pid, 0.0) for pid in used), default=0.0)
        works = worked_s >= _WORKS * passed_s and worked_s > 0
        self._counted_s += min(worked_s, passed_s) if works else passed_s
        self._used, self._looked_s = used, now_s
        return self._counted_s

    async def wait(self, futures: Collection[asyncio.Future[Any]], deadline_s: float) -> bool:
        """Whether a future is done before `deadline_s` counted seconds from now, or since later
        progress.
        """
        already_s = self.look()
        while True:
            left_s = deadline_s - (self._counted_s - min(already_s, self._counted_s))
            done, _ = await asyncio.wait(
                futures, timeout=min(max(left_s, 0.0), LOOK_S), return_when=asyncio.FIRST_COMPLETED
            )
            if done or left_s <= 0:
                return bool(done)
            counted_s = self.look()
            if counted_s < already_s:  # progress was reported
                already_s = 0.0

    def _read(self) -> dict[int, float]:
        """Processor seconds by process id, without ended processes."""
        used = {}
        for pid in self._pids():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.Error:
                continue
            used[pid] = times.user + times.system
        return used
