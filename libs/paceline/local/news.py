"""Carries what happens below a service, such as the death of a rank, to the supervisor's console.

The way is a pipe from each service: it is there before any server is, and whoever is in trouble.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Literal

VARIABLE = "PACELINE_NEWS_FD"
"""Number of the pipe's end to write to; "" where no supervisor listens."""

News = Literal["impaired", "recovered"]
TURN: Literal["turn"] = "turn"
"""Told of an event loop that turns (hung.py); nobody is shown it."""
_LINE_BYTES = 4096  # what a pipe takes whole or not at all


def tell_supervisor(news: News | Literal["turn"], what: str) -> None:
    """Show one line about this service; nothing where it was started by hand."""
    if pipe := os.environ.get(VARIABLE):
        line = f"{news} {' '.join(what.split())}".encode()[: _LINE_BYTES - 1]
        # A pipe that is full or has no reader: the same stands in the log.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(int(pipe), line + b"\n")


def news_pipe() -> tuple[int, int]:
    """Ends to read from and to write to; writing never waits."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    return reading, writing


async def heard(reading: int) -> AsyncGenerator[tuple[News | Literal["turn"], str]]:
    """What is told, until nobody has the other end; then, or when closed, the pipe is closed."""
    import asyncio  # many import this module for VARIABLE alone

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
