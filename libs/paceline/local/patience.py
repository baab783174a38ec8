"""Deadlines that follow the machine.

Deadlines of process starts and tests are stretched by the load of this machine. The factor is
PACELINE_PATIENCE if set, otherwise one plus the load per core.

Deadlines of processes are measured by their work. While processes work, their processor seconds
count; while they are idle, wall seconds count. So a busy machine stretches a deadline by its
slowdown. A stopped or deadlocked process misses the deadline on time. An endless computation misses
the deadline too. Every progress report resets the count.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psutil

from paceline.errors import ConfigError, DeadlineExceeded, PacelineError

VARIABLE = "PACELINE_PATIENCE"
T = TypeVar("T")


def patience() -> float:
    """The current factor, at least 1 unless it is set. Raises ConfigError for an invalid
    setting.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        # Add one, because the load average lags behind new load.
        return 1.0 + os.getloadavg()[0] / (os.cpu_count() or 1)
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor < float("inf"):
        raise ConfigError(f"{VARIABLE} is not a factor", seen=given, allowed="a number above 0")
    return factor


def patient(seconds: float) -> float:
    """Converts a deadline for an idle machine to a deadline for this machine's current load."""
    return seconds * patience()


async def within(seconds: float, awaited: Awaitable[T], what: str) -> T:
    """Awaits a result. Raises DeadlineExceeded with `what` after `patient(seconds)`."""
    waiting = asyncio.ensure_future(awaited)
    async with deadline(patient(seconds), what):
        await waiting
    return waiting.result()


@asynccontextmanager
async def deadline(
    seconds: float, what: str, kind: type[PacelineError] = DeadlineExceeded
) -> AsyncIterator[None]:
    """Raises `kind` with `what` when the block takes longer. A TimeoutError of the block itself
    passes.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise kind(what, seen=f"{seconds:g} s") from error


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancels tasks and waits until they have ended."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


async def unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Awaits `work` and returns True. When `stop` is set first, cancels the work and returns
    False.
    """
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        await cancel(task, stopped)


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
