"""Measures the seconds that the test's process stood still. A bound on elapsed time has to allow
for these seconds, because a watched process had them too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TICK_S = 0.05


@asynccontextmanager
async def standstill() -> AsyncIterator[Callable[[], float]]:
    """Seconds since the block began in which its event loop should have turned and did not."""
    last, stood = time.monotonic(), 0.0

    def so_far() -> float:
        return stood + max(time.monotonic() - last - 2 * TICK_S, 0.0)

    async def turn() -> None:
        nonlocal last, stood
        while True:
            await asyncio.sleep(TICK_S)
            stood = so_far()
            last = time.monotonic()

    turning = asyncio.create_task(turn())
    try:
        yield so_far
    finally:
        turning.cancel()
