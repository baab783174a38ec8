"""Implements WeightService: checks requests, passes them to the reception (reception.py), and sends
versions on to the next gateway.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Collection, Coroutine
from typing import Any, TypeVar

import grpc

from paceline.errors import InvalidInput, Unavailable, WeightsError
from paceline.messages import versions_from_proto, versions_to_proto
from paceline.rpc import EpochGuard, Track
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as engine
from paceline.v1 import weights_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceServicer
from paceline.weights import chunks, committed_sets, metrics, push, reception
from paceline.weights.assembly import Assembly
from paceline.weights.manifest import ENCODING_NAMES, check_manifest, target_name, version_name
from paceline.weights.spool import Spool

T = TypeVar("T")


class Forward:
    """Sends each arriving version on to the next gateway, chunk by chunk as the chunks arrive.

    Use on one event loop. A version that is already complete is sent from the spool. The push of a
    version to a gateway ends when the next gateway has loaded it too.
    """

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
        if assembly is None:
            parts = self._stored(manifest, wanted.wanted_chunks)
        else:
            parts = _arriving(assembly, wanted.wanted_chunks, ends_s)
        response = await sending.stream(parts)
        if response.missing_chunks:
            message = f"{version_name(manifest)} misses chunks at the next gateway"
            raise WeightsError(message, seen=response.missing_chunks, allowed=0)

    async def _stored(
        self, manifest: pb.Manifest, wanted: Collection[int]
    ) -> AsyncIterator[chunks.CheckedRange]:
        for index in wanted:
            data = await asyncio.to_thread(self._spool.read_chunk, manifest, index)
            yield chunks.checked_range(chunks.chunk_span(manifest, index)[0], memoryview(data))


async def _arriving(
    assembly: Assembly, wanted: Collection[int], ends_s: float
) -> AsyncIterator[chunks.CheckedRange]:
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
            start, end = chunks.chunk_span(assembly.manifest, index)
            yield chunks.checked_range(start, assembly.buffer[start:end])


def _retrieve(task: asyncio.Task[None]) -> None:
    """Reads the error of a task; `finish` raises it."""
    if not task.cancelled():
        task.exception()


class WeightServicer(WeightServiceServicer):
    """WeightService over a spool.

    `targets` are the parts of a commit: policy and drafter at the gateway, the head at the drafter
    trainer.
    """

    def __init__(
        self,
        spool: Spool,
        guard: EpochGuard,
        hooks: reception.WeightHooks,
        *,
        targets: tuple[int, ...] = (engine.WEIGHT_TARGET_POLICY, engine.WEIGHT_TARGET_DRAFTER),
        forward: Forward | None = None,
    ) -> None:
        """`forward`: sends every version on."""
        self._forward = forward
        self.reception = reception.Reception(spool, hooks, targets)
        self._spool = spool
        self._guard = guard
        self._targets = targets
        self._changes: set[asyncio.Task[Any]] = set()

    @property
    def serving(self) -> VersionSet:
        """The serving set; version 0 of each part before the first commit."""
        return self.reception.serving

    async def Prepare(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse:
        """Returns the chunks still wanted; allocates the buffer of a new version.

        Raises StaleEpoch, InvalidInput for an invalid manifest or target, and the errors of
        Reception.prepare.
        """
        manifest = request.manifest
        self._guard.check(request.context, _track_of(manifest.target))
        check_manifest(manifest)
        if manifest.target not in self._targets:
            allowed = ", ".join(target_name(target) for target in self._targets)
            message = "this receiver does not accept the target"
            raise InvalidInput(message, seen=target_name(manifest.target), allowed=allowed)
        with self.reception.working("prepares for weights"):
            answer = await self._whole(self.reception.prepare(manifest))
            if self._forward is not None:
                part = (manifest.target, manifest.version)
                assembly = None if answer.complete else self.reception.receiving(part)
                await self._forward.send(request.context, manifest, assembly)
            return answer

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: Any
    ) -> pb.PushResponse:
        """Receives the chunks of one version; returns when it is spooled and loaded beside the
        serving one.
        """
        with self.reception.working("receives weights"):
            return await self._push(request_iterator)

    async def _push(self, request_iterator: AsyncIterator[pb.PushRequest]) -> pb.PushResponse:
        part: committed_sets.Part | None = None
        assembly: Assembly | None = None
        received = 0
        try:
            async for chunk in request_iterator:
                if part is None:
                    self._check_first(chunk)
                    part = (chunk.target, chunk.version)
                elif part != (chunk.target, chunk.version):
                    message = "a push moves one version"
                    raise InvalidInput(message, seen=(chunk.target, chunk.version), allowed=part)
                assembly = self.reception.receiving(part, assembly)
                received += assembly.place(chunk)
        finally:
            if assembly is not None:
                manifest = assembly.manifest
                metrics.RECEIVED_BYTES.record(
                    received,
                    target=target_name(manifest.target),
                    encoding=ENCODING_NAMES[manifest.encoding],
                )

        if part is None:
            raise InvalidInput("a push carries at least one chunk", seen=0, allowed=">= 1")
        answer = await self._whole(self.reception.finish(part, received))
        if self._forward is not None and not answer.missing_chunks:
            await self._forward.finish(part)
        return answer

    def _check_first(self, chunk: pb.PushRequest) -> None:
        if not chunk.HasField("context"):
            message = "the first chunk of a push carries no context"
            raise InvalidInput(message, seen="absent", allowed="present")
        self._guard.check(chunk.context, _track_of(chunk.target))

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        """Serves a set: workers first, then versions.json. Serving the present set again has no
        effect. Raises StaleEpoch, InvalidInput for an unknown pause mode, WeightsError for a part
        that is not prepared or a seq that does not grow, and the errors of the hooks.
        """
        self._guard.check(request.context, Track.LEARNER)
        versions = versions_from_proto(request.versions)
        mode = request.mode or engine.PAUSE_MODE_IN_PLACE
        if mode not in engine.PauseMode.values():
            message = "there is no such pause mode"
            raise InvalidInput(message, seen=int(mode), allowed=engine.PauseMode.keys()[1:])
        with self.reception.working("commits weights"):
            judge = request.judge if request.HasField("judge") else None
            await self._whole(
                self.reception.commit(versions, mode, request.leased_workers, judge=judge)
            )
        return pb.CommitResponse(versions=versions_to_proto(versions))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Drops a version; an absent one counts as dropped.

        Raises WeightsError when it is serving.
        """
        self._guard.check(request.context, _track_of(request.target))
        target_name(request.target)
        part = (request.target, request.version)
        await self._whole(self.reception.abort(part))
        if self._forward is not None:
            await self._forward.abort(request.context, part)
        return pb.AbortResponse()

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[pb.PullResponse]:
        """The manifest of the serving version, then its chunks."""
        part = (request.target, committed_sets.part_version(self.serving, request.target))
        target_name(part[0])
        manifest = self._spool.manifest(*part)
        if manifest is None:
            yield pb.PullResponse(manifest=pb.Manifest(target=request.target, version=part[1]))
            return
        yield pb.PullResponse(manifest=manifest)
        for index in range(chunks.chunk_count(manifest)):
            data = await asyncio.to_thread(self._spool.read_chunk, manifest, index)
            chunk = pb.PushRequest(
                target=part[0],
                version=part[1],
                chunk_index=index,
                crc32=zlib.crc32(data),
                data=data,
            )
            yield pb.PullResponse(chunk=chunk)

    async def GetVersions(
        self, request: pb.GetVersionsRequest, context: Any
    ) -> pb.GetVersionsResponse:
        """Serving, previous and prepared versions, and damaged parts of the serving set. At a
        receiver of heads, prepared_policy holds prepared heads.
        """
        previous = self._spool.sets.previous
        return pb.GetVersionsResponse(
            versions=versions_to_proto(self.serving),
            previous=versions_to_proto(previous) if previous else None,
            prepared_policy=self._prepared_versions(self._targets[0]),
            prepared_drafter=self._prepared_versions(engine.WEIGHT_TARGET_DRAFTER),
            damaged=sorted(target for target, _ in self._spool.damaged),  # type: ignore[misc]
        )

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Runs a change to its end even if its caller leaves; half a change would let a second
        writer in.
        """
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    def _prepared_versions(self, target: int) -> list[int]:
        return sorted(version for kind, version in self._spool.prepared if kind == target)


def _track_of(target: int) -> Track:
    """The lease track of a part's pushes."""
    return Track.DRAFTER if target == engine.WEIGHT_TARGET_DRAFTER else Track.LEARNER
