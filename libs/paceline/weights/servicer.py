"""Implements WeightService: checks requests and passes them to the reception (reception.py)."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from paceline.errors import InvalidInput
from paceline.messages import versions_from_proto, versions_to_proto
from paceline.rpc import EpochGuard, Track
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as engine
from paceline.v1 import weights_pb2 as pb
from paceline.v1.weights_pb2_grpc import WeightServiceServicer
from paceline.weights import chunks, committed_sets, metrics, reception, wire
from paceline.weights.assembly import Assembly
from paceline.weights.forward import Forward
from paceline.weights.manifest import ENCODING_NAMES, check_manifest, target_name
from paceline.weights.spool import Spool

T = TypeVar("T")


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
            raise InvalidInput(
                "this receiver does not take that target",
                seen=target_name(manifest.target),
                allowed=allowed,
            )
        with self.reception.working("prepares for weights"):
            answer = await self._whole(self.reception.prepare(manifest))
            if self._forward is not None:
                part = (manifest.target, manifest.version)
                assembly = None if answer.complete else self.reception.receiving(part)
                await self._forward.send(request.context, manifest, assembly)
            return answer

    async def Push(
        self, request_iterator: AsyncIterator[wire.PushChunk], context: Any
    ) -> pb.PushResponse:
        """Receives the chunks of one version; returns when it is spooled and loaded beside the
        serving one.
        """
        with self.reception.working("receives weights"):
            return await self._push(request_iterator)

    async def _push(self, request_iterator: AsyncIterator[wire.PushChunk]) -> pb.PushResponse:
        part: committed_sets.Part | None = None
        assembly: Assembly | None = None
        received = 0
        try:
            async for chunk in request_iterator:
                if part is None:
                    self._check_first(chunk)
                    part = (chunk.target, chunk.version)
                elif part != (chunk.target, chunk.version):
                    raise InvalidInput(
                        "a push moves one version", seen=(chunk.target, chunk.version), allowed=part
                    )
                assembly = self.reception.receiving(part, assembly)
                assembly.place(chunk)
                received += len(chunk.data)
        finally:
            if assembly is not None:
                _count(received, assembly)

        if part is None:
            raise InvalidInput("a push carries at least one chunk", seen=0, allowed=">= 1")
        return await self._finish(part, received)

    async def _finish(self, part: committed_sets.Part, received: int) -> pb.PushResponse:
        answer = await self._whole(self.reception.finish(part, received))
        if self._forward is not None and not answer.missing_chunks:
            await self._forward.finish(part)
        return answer

    def _check_first(self, chunk: wire.PushChunk) -> None:
        if chunk.context is None:
            raise InvalidInput(
                "the first chunk of a push carries no context", seen="absent", allowed="present"
            )
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
            raise InvalidInput(
                "there is no such pause mode", seen=int(mode), allowed=engine.PauseMode.keys()[1:]
            )
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


def _count(received: int, assembly: Assembly) -> None:
    encoding = ENCODING_NAMES[assembly.manifest.encoding]
    target = target_name(assembly.manifest.target)
    metrics.RECEIVED_BYTES.record(received, target=target, encoding=encoding)


def _track_of(target: int) -> Track:
    """The lease track of a part's pushes."""
    return Track.DRAFTER if target == engine.WEIGHT_TARGET_DRAFTER else Track.LEARNER
