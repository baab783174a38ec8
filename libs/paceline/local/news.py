"""Carries events inside a service to the supervisor: the death of a rank, a turn of its event loop.

Each service writes to a pipe. The pipe exists before any server and works during faults.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Literal

from paceline.config import RunConfig
from paceline.local.patience import patient
from paceline.local.processes import NEWS_VARIABLE

News = Literal["impaired", "recovered"]
TURN: Literal["turn"] = "turn"
"""A turn of the event loop; never displayed."""
LAST = "last"
"""The text of the last turn."""
HUNG_S = RunConfig().hung_s
"""Default of run.hung_s: maximum seconds of a service without a turn."""
_REPORTS = 6  # turns within the limit
_LINE_BYTES = 4096  # maximum size of an atomic pipe write


def tell_supervisor(news: News | Literal["turn"], what: str) -> None:
    """Sends one line about this service to the supervisor; does nothing without a supervisor."""
    if pipe := os.environ.get(NEWS_VARIABLE):
        line = f"{news} {' '.join(what.split())}".encode()[: _LINE_BYTES - 1]
        # Drop the line if the pipe is full or has no reader: the log contains it too.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(int(pipe), line + b"\n")


async def report_turns(limit_s: float) -> None:
    """Reports turns of this event loop to the supervisor until cancelled.

    A final report ends the limit, because work after the loop may take any time. For `limit_s` 0
    nothing is reported.
    """
    if not limit_s:
        return
    try:
        while True:
            tell_supervisor(TURN, "")
            await asyncio.sleep(limit_s / _REPORTS)
    finally:
        tell_supervisor(TURN, LAST)


def news_pipe() -> tuple[int, int]:
    """A pipe's read end and write end; writes never block."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    return reading, writing


async def heard(reading: int) -> AsyncGenerator[tuple[News | Literal["turn"], str]]:
    """Yields (kind, text) of each line until the write end is closed; then closes the pipe."""
    lines = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(reading, "rb", 0)
    )
    try:
        async for line in lines:
            news, _, what = line.decode(errors="replace").rstrip().partition(" ")
            yield TURN if news == TURN else "recovered" if news == "recovered" else "impaired", what
    finally:
        transport.close()


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
                with suppress(TimeoutError):
                    async with asyncio.timeout(patient(seconds)):
                        await self._noted.wait()
                    break
            else:
                return f", hung: no progress for {self._limit_s:g} s"
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
