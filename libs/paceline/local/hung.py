"""Detects hung processes: services report turns of their event loop, other servers answer pings."""

import asyncio

from paceline.config import RunConfig
from paceline.local import news, patience

HUNG_S = RunConfig().hung_s
"""Default of run.hung_s: maximum seconds of a service without a turn."""
_REPORTS = 6  # reports within the limit
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
            news.tell_supervisor(news.TURN, "")
            await asyncio.sleep(limit_s / _REPORTS)
    finally:
        news.tell_supervisor(news.TURN, LAST)


class Turns:
    """The supervisor's view of one process's turns, or of its answers to pings."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds without a turn after which a process counts as hung; 0: no limit.

        The limit starts with the first turn and stretches with the load of the machine.
        """
        self._limit_s = limit_s
        self._noted = asyncio.Event()
        self._over = False  # the process has sent LAST

    def note(self, what: str = "") -> None:
        """Records a turn: "", or LAST."""
        self._over = what == LAST
        self._noted.set()

    async def end(self) -> str:
        """Waits until turns stop. Returns the reason, for Child.kill."""
        await self._noted.wait()
        while self._limit_s and not self._over:
            self._noted.clear()
            # Check twice: after a stop of this process itself, reports are still unread.
            for seconds in (self._limit_s, self._limit_s / _REPORTS):
                try:
                    async with asyncio.timeout(patience.patient(seconds)):
                        await self._noted.wait()
                    break
                except TimeoutError:
                    pass
            else:
                return f", hung: no progress for {self._limit_s:g} s"
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")
