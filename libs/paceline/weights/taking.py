"""Places ranges of a sender's file into an arriving version, as if they had been sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from paceline.errors import InvalidInput
from paceline.v1.weights_pb2 import FileRange, TakeRequest
from paceline.weights.assembly import Assembly
from paceline.weights.handover import HandoverDirectory, check_inside, read_range
from paceline.weights.threads import in_threads
from paceline.weights.wire import PushChunk

_AT_ONCE = 8
"""Ranges in memory before they are placed."""


async def take_ranges(
    assembly_of: Callable[[], Assembly], request: TakeRequest, directory: HandoverDirectory
) -> int:
    """Checks and places ranges; returns their number of bytes. `assembly_of` raises if the
    announced version has changed.

    Raises InvalidInput with reason HANDOVER for a refused file, and the errors of Assembly.place.
    """
    received = 0
    with directory.opened(request.file) as handle:
        check_inside(handle, max((one.position + one.nbytes for one in request.ranges), default=0))
        for at in range(0, len(request.ranges), _AT_ONCE):
            ranges = request.ranges[at : at + _AT_ONCE]
            for chunk in await asyncio.to_thread(_read, assembly_of(), request, handle, ranges):
                assembly_of().place(chunk, checked=True)
                received += len(chunk.data)
    return received


def _read(
    assembly: Assembly, request: TakeRequest, handle: int, ranges: Sequence[FileRange]
) -> list[PushChunk]:
    """The ranges of the file, checked, in several threads."""
    most = assembly.manifest.chunk_bytes

    def read(one: FileRange) -> PushChunk:
        if one.nbytes > most:
            raise InvalidInput("a range is longer than a chunk", seen=one.nbytes, allowed=most)
        data = read_range(handle, one.position, one.nbytes)
        index, offset = divmod(one.start, most)
        chunk = PushChunk(request.target, request.version, index, one.crc32, data, None, offset)
        assembly.check(chunk)
        return chunk

    return list(in_threads(read, ranges))
