"""Sends each arriving version on to the next gateway, chunk by chunk as the chunks arrive.

A version that is already complete is sent from the spool. The push of a version to a gateway ends
when the next gateway has loaded it too.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection

import grpc

from paceline.errors import Unavailable, WeightsError
from paceline.v1 import weights_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import committed_sets, push
from paceline.weights.assembly import Assembly
from paceline.weights.chunks import CheckedRange, checked_range, chunk_span
from paceline.weights.manifest import version_name
from paceline.weights.spool import Spool


class Forward:
    """The versions on their way to the next gateway. Use on one event loop."""

    def __init__(self, channel: grpc.aio.Channel, spool: Spool) -> None:
        self._channel = channel
        self._spool = spool
        self._running: dict[committed_sets.Part, tuple[pb.Manifest, asyncio.Task[None]]] = {}

    async def send(
        self, context: CommandContext, manifest: pb.Manifest, assembly: Assembly | None
    ) -> None:
        """Sends a version while it arrives in `assembly`. Without an assembly, the version is in
        the spool, and the call returns when the next gateway has it. Raises the receiver's errors.
        """
        part = (manifest.target, manifest.version)
        running, task = self._running.get(part, (None, None))
        if task is None or task.done() or (assembly is not None and running != manifest):
            self._stop(part)
            if assembly is None:
                manifest = self._spool.manifest(*part) or manifest
            task = asyncio.create_task(self._send(context, manifest, assembly))
            task.add_done_callback(_retrieve)
            self._running[part] = (manifest, task)
        if assembly is None:
            await self.finish(part)

    async def finish(self, part: committed_sets.Part) -> None:
        """Returns when the next gateway has the version. Raises its errors, and Unavailable when
        another push has replaced the version.
        """
        if (running := self._running.get(part)) is None:
            return
        task = running[1]
        await asyncio.wait([task])
        if self._running.get(part) is running:
            del self._running[part]
        if task.cancelled():
            raise Unavailable("another push replaced the version on its way", seen=part[1])
        task.result()

    async def abort(self, context: CommandContext, part: committed_sets.Part) -> None:
        """Drops a version at the next gateway too. Raises its errors."""
        self._stop(part)
        await push.abort_version(self._channel, context, *part)

    async def close(self) -> None:
        """Stops all sending and closes the channel."""
        for part in [*self._running]:
            self._stop(part)
        await self._channel.close()

    def _stop(self, part: committed_sets.Part) -> None:
        if (running := self._running.pop(part, None)) is not None:
            running[1].cancel()

    async def _send(
        self, context: CommandContext, manifest: pb.Manifest, assembly: Assembly | None
    ) -> None:
        ends_s = time.monotonic() + push.push_deadline_s(manifest.total_bytes)
        sending = push.Sending(self._channel, manifest, context, ends_s)
        wanted = await sending.prepare()
        if wanted.complete:
            return
        chunks = wanted.wanted_chunks
        if assembly is None:
            parts = self._stored(manifest, chunks)
        else:
            parts = _arriving(assembly, chunks, ends_s)
        response = await sending.stream(parts)
        if response.missing_chunks:
            raise WeightsError(
                f"{version_name(manifest)} misses chunks at the next gateway",
                seen=response.missing_chunks,
                allowed=0,
            )

    async def _stored(
        self, manifest: pb.Manifest, wanted: Collection[int]
    ) -> AsyncIterator[CheckedRange]:
        for index in wanted:
            data = await asyncio.to_thread(self._spool.read_chunk, manifest, index)
            yield checked_range(chunk_span(manifest, index)[0], memoryview(data))


async def _arriving(
    assembly: Assembly, wanted: Collection[int], ends_s: float
) -> AsyncIterator[CheckedRange]:
    """The wanted chunks in the order of their arrival. Raises TimeoutError at a time of the
    monotonic clock: gRPC does not end the reader of a call that has reached its deadline.
    """
    left, place = set(wanted), 0
    while left:
        while place == len(assembly.arrived):
            assembly.news.clear()
            async with asyncio.timeout(ends_s - time.monotonic()):
                await assembly.news.wait()
        index = assembly.arrived[place]
        place += 1
        if index in left:
            left.discard(index)
            start, end = chunk_span(assembly.manifest, index)
            yield checked_range(start, assembly.buffer[start:end])


def _retrieve(task: asyncio.Task[None]) -> None:
    """Reads the error of a task; `finish` raises it."""
    if not task.cancelled():
        task.exception()
