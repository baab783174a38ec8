"""Watches whether what runs gets on: a service tells its supervisor that its event loop turns, a
server that tells nothing is asked.

Beats (heartbeat.py) say that a process runs. Its loop may stand nevertheless, in code that does not
return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from paceline.config.shared import RunConfig
from paceline.errors import PacelineError
from paceline.local.news import TURN, tell_supervisor
from paceline.local.patience import patient

HUNG_S = RunConfig().hung_s
"""Seconds without a turn that a service may have, unless set."""
_TOLD = 6  # turns in the limit
_MISSES = 2
LAST = "last"


async def tell_turns(limit_s: float) -> None:
    """Tells the supervisor of the turns of this loop, until it is cancelled: what the process does
    without a loop may take any time. Not at all for 0.
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
    """The supervisor's end, of one process."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds without a turn after which a process that has told of one is hung,
        stretched by the load of the machine; 0: never.
        """
        self._limit_s = limit_s
        self._told = asyncio.Event()
        self._over = False  # no more turns are due

    def note(self, what: str) -> None:
        """A turn is told: "", or LAST."""
        self._over = what == LAST
        self._told.set()

    async def end(self) -> str:
        """Returns when no turn is told any more; why the process is to be killed, as Heartbeat has
        it.
        """
        await self._told.wait()
        while self._limit_s and not self._over:
            self._told.clear()
            # Twice: where this process has stood itself, what was told still waits to be read.
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
    """Asks a server again and again. Returns why it is to be killed, once it has not answered for
    `limit_s` seconds; never where `every_s` or `limit_s` is 0.

    `tell`: called with False after two questions in a row without an answer, with True when the
    server answers again.
    """
    if not every_s or not limit_s:
        return await _never()
    misses = 0  # in a row; no clock, so that a pause of this process is none of the server's
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
