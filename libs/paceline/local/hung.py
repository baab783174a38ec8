"""Detects hung processes: services report turns of their event loop, other servers get pings.

Heartbeats (heartbeat.py) show only that a process runs. Its event loop may still be blocked in code
that does not return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from paceline.config.shared import RunConfig
from paceline.errors import PacelineError
from paceline.local.news import TURN, tell_supervisor
from paceline.local.patience import patient

HUNG_S = RunConfig().hung_s
"""Default of run.hung_s: maximum seconds of a service without a turn."""
_TOLD = 6  # reports within the limit
_MISSES = 2
LAST = "last"


async def tell_turns(limit_s: float) -> None:
    """Reports turns of this event loop to the supervisor until cancelled.

    A final report ends the limit, because work after the loop may take any time. For `limit_s` 0
    nothing is reported.
    """
    if not limit_s:
        return
    try:
        while True:
            tell_supervisor(TURN, "")
            await asyncio.sleep(limit_s / _TOLD)
    finally:
        tell_supervisor(TURN, LAST)


class Turns:
    """The supervisor's view of one process's turns."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds without a turn after which a process counts as hung; 0: no limit.

        The limit starts with the first turn and stretches with the load of the machine.
        """
        self._limit_s = limit_s
        self._told = asyncio.Event()
        self._over = False  # the process has sent LAST

    def note(self, what: str) -> None:
        """Records a turn: "", or LAST."""
        self._over = what == LAST
        self._told.set()

    async def end(self) -> str:
        """Waits until turns stop. Returns the reason to kill the process, in the form of
        Heartbeat's verdict.
        """
        await self._told.wait()
        while self._limit_s and not self._over:
            self._told.clear()
            # Check twice: after a stop of this process itself, reports are still unread.
            for seconds in (self._limit_s, self._limit_s / _TOLD):
                try:
                    async with asyncio.timeout(patient(seconds)):
                        await self._told.wait()
                    break
                except TimeoutError:
                    pass
            else:
                return f", hung: its loop got nowhere for {self._limit_s:g} s"
        return await _never()


async def unanswered(
    ask: Callable[[float], Awaitable[object]],
    every_s: float,
    limit_s: float,
    tell: Callable[[bool], None],
) -> str:
    """Pings a server repeatedly. Returns the reason to kill it after `limit_s` seconds without a
    reply.

    Never returns if `every_s` or `limit_s` is 0. `tell` receives False after two failed pings in a
    row, and True once the server replies again.
    """
    if not every_s or not limit_s:
        return await _never()
    misses = 0  # in a row; no clock, so that a pause of this process does not count
    while True:
        try:
            await ask(patient(every_s))
        except PacelineError:
            misses += 1
            if 2 * every_s * misses >= limit_s:
                return f", hung: no answer for {limit_s:g} s"
            if misses == _MISSES:
                tell(False)
        else:
            if misses >= _MISSES:
                tell(True)
            misses = 0
        await asyncio.sleep(every_s)


async def _never() -> str:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody completes this future")
