"""Traffic on a stream while its server is disturbed between appends and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from watched_stream import WatchedStream

from paceline.local.patience import patient

TOTAL = 300


async def go_through(stream: WatchedStream, happens: Mapping[int, Callable[[], object]]) -> None:
    """Append and read TOTAL entries at once; `happens` maps entries to disturbances before them.

    Each entry has to arrive once and in order, and to leave nothing behind.
    """
    await stream.create_group("g")
    async with asyncio.timeout(patient(60)):
        _, numbers = await asyncio.gather(_append(stream, happens), _read(stream))
    assert numbers == list(range(TOTAL))
    depth = await stream.depth()
    assert (depth.entries, depth.bytes, depth.pending) == (0, 0, 0)


async def _append(stream: WatchedStream, happens: Mapping[int, Callable[[], object]]) -> None:
    for n in range(TOTAL):
        if n in happens:
            await asyncio.to_thread(happens[n])
        await stream.append({"n": str(n)}, b"x" * 100)


async def _read(stream: WatchedStream) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < TOTAL:
        entries = await stream.read("g", "c", 7, 5.0)
        numbers += [int(entry.fields["n"]) for entry in entries]
        await stream.ack("g", [entry.id for entry in entries])
    return numbers
