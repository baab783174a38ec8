"""Counts time against the deadline of processes by what they do.

While processes work, the processor seconds that they use count; while they do nothing, the seconds
of the wall count. So a busy machine stretches a deadline by as much as it slows the processes, a
stopped or deadlocked process misses the deadline on time, and one that computes without end misses
it too. Each word of progress begins the count anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import psutil

LOOK_S = 1.0
"""Seconds between two looks at what processes have used."""
_WORKS = 0.01
"""Share of a core from which a process works: the kernel counts in ticks of 10 ms."""


class WorkClock:
    """Seconds that count since the last word of some processes, which may wait for each other."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        """`pids`: of the processes on this host, at each look; where there are none, the wall's
        seconds count.
        """
        self._pids = pids
        self._counted_s = 0.0
        self._used = self._read()
        self._looked_s = time.monotonic()

    def restart(self) -> None:
        """A word of progress: nothing counts any more."""
        self.look()
        self._counted_s = 0.0

    @property
    def counted_s(self) -> float:
        """Seconds that count up to the last look, and the wall's since then."""
        return self._counted_s + time.monotonic() - self._looked_s

    def look(self) -> float:
        """Counts what has passed since the last look; returns the seconds that count."""
        now_s, used = time.monotonic(), self._read()
        passed_s = now_s - self._looked_s
        worked_s = max((used[pid] - self._used.get(pid, 0.0) for pid in used), default=0.0)
        works = worked_s >= _WORKS * passed_s and worked_s > 0
        self._counted_s += min(worked_s, passed_s) if works else passed_s
        self._used, self._looked_s = used, now_s
        return self._counted_s

    async def wait(self, futures: Collection[asyncio.Future[Any]], deadline_s: float) -> bool:
        """Whether one of the futures is done before `deadline_s` seconds have counted from now on,
        or since a word that comes meanwhile.
        """
        already_s = self.look()
        while True:
            left_s = deadline_s - (self._counted_s - min(already_s, self._counted_s))
            done, _ = await asyncio.wait(
                futures,
                timeout=min(max(left_s, 0.0), LOOK_S),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if done or left_s <= 0:
                return bool(done)
            counted_s = self.look()
            if counted_s < already_s:  # a word has come
                already_s = 0.0

    def _read(self) -> dict[int, float]:
        """Processor seconds that each process has used, by its id; without those that are gone."""
        used = {}
        for pid in self._pids():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.Error:
                continue
            used[pid] = times.user + times.system
        return used
