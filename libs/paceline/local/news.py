"""Carries events inside a service, such as the death of a rank, to the supervisor's console.

Each service writes to a pipe. The pipe exists before any server and works during faults.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Literal

VARIABLE = "PACELINE_NEWS_FD"
"""File descriptor of the pipe's write end; "" without a supervisor."""

News = Literal["impaired", "recovered"]
TURN: Literal["turn"] = "turn"
"""A turn of the event loop (hung.py); never displayed."""
_LINE_BYTES = 4096  # maximum size of an atomic pipe write


def tell_supervisor(news: News | Literal["turn"], what: str) -> None:
    """Sends one line about this service to the supervisor; does nothing without a supervisor."""
    if pipe := os.environ.get(VARIABLE):
        line = f"{news} {' '.join(what.split())}".encode()[: _LINE_BYTES - 1]
        # Drop the line if the pipe is full or has no reader: the log contains it too.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(int(pipe), line + b"\n")


def news_pipe() -> tuple[int, int]:
    """A pipe's read end and write end; writes never block."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    return reading, writing


async def heard(reading: int) -> AsyncGenerator[tuple[News | Literal["turn"], str]]:
    """Yields (kind, text) of each line until the write end is closed; then closes the pipe."""
    import asyncio  # many modules import this one for VARIABLE only

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
