"""Receiver of weights: implements WeightService. Owns which versions arrive, are prepared and
serve; one writer.

What a version means to workers is the hooks' business; what is on disk is the spool's.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.errors import DataLoss, InvalidInput, ResourceExhausted, WeightsError
from paceline.messages import versions_from_proto, versions_to_proto
from paceline.rpc import EpochGuard, Track
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1 import weights_pb2 as pb
from paceline.v1.engine_pb2 import (
    PAUSE_MODE_IN_PLACE,
    WEIGHT_TARGET_DRAFTER,
    WEIGHT_TARGET_POLICY,
    PauseMode,
)
from paceline.v1.weights_pb2_grpc import WeightServiceServicer
from paceline.weights.assembly import Assembly
from paceline.weights.manifest import check_manifest, chunk_count, target_name, track_of
from paceline.weights.metrics import VERSIONS_REFUSED, VERSIONS_REPLACED
from paceline.weights.spool import Part, Spool, part_version
from paceline.weights.wire import PushChunk

_log = get_logger(__name__)
T = TypeVar("T")

MAX_IN_FLIGHT = 2
"""Versions of one target that may be receiving or prepared at a time."""
DEFAULT_MAX_BYTES = 32 << 30
"""Largest stream of one version; two of each target may be in memory at a time."""


class WeightHooks(Protocol):
    """What the receiving service does with versions. Calls never overlap."""

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        """Loads a spooled version beside the serving one, on every worker.

        An exception fails the Push.
        """
        ...

    async def on_commit(self, versions: VersionSet, mode: int) -> None:
        """Serves the set on every worker; all parts were given to on_prepared.

        An exception fails the Commit.
        """
        ...

    async def on_abort(self, target: int, version: int) -> None:
        """Forgets a version that was given to on_prepared."""
        ...


class WeightServicer(WeightServiceServicer):
    """WeightService over a spool.

    `targets` are the parts a commit needs here: policy and drafter at the gateway, the head at the
    drafter trainer.
    """

    def __init__(
        self,
        spool: Spool,
        guard: EpochGuard,
        hooks: WeightHooks,
        *,
        targets: tuple[int, ...] = (WEIGHT_TARGET_POLICY, WEIGHT_TARGET_DRAFTER),
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._spool = spool
        self._guard = guard
        self._hooks = hooks
        self._targets = targets
        self._max_bytes = max_bytes
        self._receiving: dict[Part, Assembly] = {}
        self._loaded: set[Part] = set()  # given to on_prepared and not yet committed or aborted
        self._writer = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    @property
    def serving(self) -> VersionSet:
        """Set being served; version 0 of everything before the first commit."""
        return self._spool.serving or VersionSet()

    async def Prepare(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse:
        """Answers the chunks still wanted; allocates the buffer of a new version."""
        manifest = request.manifest
        self._guard.check(request.context, track_of(manifest.target))
        check_manifest(manifest, max_bytes=self._max_bytes)
        if manifest.target not in self._targets:
            allowed = ", ".join(target_name(target) for target in self._targets)
            raise InvalidInput(
                "this receiver does not take that target",
                seen=target_name(manifest.target),
                allowed=allowed,
            )
        return await self._whole(self._prepare(manifest))

    async def _prepare(self, manifest: pb.Manifest) -> pb.PrepareResponse:
        part = (manifest.target, manifest.version)
        async with self._writer:
            assembly = self._receiving.get(part)
            damaged = assembly is None and await self._remove_damaged(part)
            replaced = await self._make_way(manifest)
            assembly = self._receiving.get(part)
            if assembly is None and not damaged and self._is_spooled(manifest):
                if manifest.version > part_version(self.serving, manifest.target):
                    await self._load(part)
                return pb.PrepareResponse(complete=True)
            if assembly is None:
                self._admit(part)
                assembly = self._receiving[part] = Assembly(manifest, self._max_bytes)
            return pb.PrepareResponse(wanted_chunks=assembly.wanted(), replaced=replaced)

    async def _remove_damaged(self, part: Part) -> bool:
        """Whether the spooled version, serving or not, is to be pushed again."""
        try:
            await asyncio.to_thread(self._spool.check, *part)
        except DataLoss:
            await asyncio.to_thread(self._spool.remove, *part)
            return True
        return False

    async def _make_way(self, manifest: pb.Manifest) -> bool:
        """Forgets other content of the version; False when there is none.

        Raises WeightsError when a kept set names the version: what has served stays what it was.
        """
        part = (manifest.target, manifest.version)
        assembly = self._receiving.get(part)
        known = assembly.manifest if assembly else self._spool.manifest(*part)
        if known is None or known == manifest:
            return False
        if assembly is None and part not in self._spool.prepared:
            raise WeightsError(
                f"{_name(part)} is kept with other content",
                seen=manifest.content_hash,
                allowed=known.content_hash,
            )
        VERSIONS_REPLACED.record(target=target_name(part[0]))
        _log.warning("version_replaced", version=_name(part))
        await self._forget(part)
        return True

    async def Push(
        self, request_iterator: AsyncIterator[PushChunk], context: Any
    ) -> pb.PushResponse:
        """Takes the chunks of one version; returns when it is spooled and loaded beside the serving
        one.
        """
        part: Part | None = None
        assembly: Assembly | None = None
        received = 0
        async for chunk in request_iterator:
            if part is None:
                if chunk.context is None:
                    raise InvalidInput(
                        "the first chunk of a push carries no context",
                        seen="absent",
                        allowed="present",
                    )
                self._guard.check(chunk.context, track_of(chunk.target))
                part = (chunk.target, chunk.version)
                assembly = self._receiving.get(part)
            elif part != (chunk.target, chunk.version):
                raise InvalidInput(
                    "a push moves one version", seen=(chunk.target, chunk.version), allowed=part
                )
            if assembly is None or assembly is not self._receiving.get(part):
                raise self._not_announced(part)
            assembly.place(chunk)
            received += len(chunk.data)

        if part is None:
            raise InvalidInput("a push carries at least one chunk", seen=0, allowed=">= 1")
        return await self._whole(self._finish(part, received))

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        """Serves a set: workers first, then versions.json; the serving set again is answered
        without effect.
        """
        self._guard.check(request.context, Track.LEARNER)
        versions = versions_from_proto(request.versions)
        mode = request.mode or PAUSE_MODE_IN_PLACE
        if mode not in PauseMode.values():
            raise InvalidInput(
                "there is no such pause mode", seen=int(mode), allowed=PauseMode.keys()[1:]
            )
        await self._whole(self._commit(versions, mode))
        return pb.CommitResponse(versions=versions_to_proto(versions))

    async def _commit(self, versions: VersionSet, mode: int) -> None:
        async with self._writer:
            if versions != self._spool.serving:
                targets = self._awaited()
                self._check_commit(versions, targets)
                for target in targets:
                    await self._load((target, part_version(versions, target)))
                await self._hooks.on_commit(versions, mode)
                await asyncio.to_thread(self._spool.commit, versions)
                self._forget_older(versions)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Forgets a version; one that is not here is forgotten already.

        WeightsError when it is being served.
        """
        self._guard.check(request.context, track_of(request.target))
        target_name(request.target)
        await self._whole(self._abort((request.target, request.version)))
        return pb.AbortResponse()

    async def _abort(self, part: Part) -> None:
        async with self._writer:
            if part[1] == part_version(self.serving, part[0]):
                raise WeightsError(
                    "a serving version cannot be aborted",
                    seen=_name(part),
                    allowed="a prepared version",
                )
            await self._forget(part)

    async def _forget(self, part: Part) -> None:
        self._receiving.pop(part, None)
        if part in self._loaded:
            await self._hooks.on_abort(*part)
            self._loaded.discard(part)
        await asyncio.to_thread(self._spool.discard, *part)

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[pb.PullResponse]:
        """The manifest of the version that serves, then its chunks."""
        part = (request.target, part_version(self.serving, request.target))
        target_name(part[0])
        manifest = self._spool.manifest(*part)
        if manifest is None:
            yield pb.PullResponse(manifest=pb.Manifest(target=request.target, version=part[1]))
            return
        yield pb.PullResponse(manifest=manifest)
        for index in range(chunk_count(manifest)):
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
        """Serving, previous and prepared versions, and which of the serving are damaged; where
        heads are taken, prepared_policy names those.
        """
        previous = self._spool.previous
        return pb.GetVersionsResponse(
            versions=versions_to_proto(self.serving),
            previous=versions_to_proto(previous) if previous else None,
            prepared_policy=self._prepared_versions(self._targets[0]),
            prepared_drafter=self._prepared_versions(WEIGHT_TARGET_DRAFTER),
            damaged=sorted(target for target, _ in self._spool.damaged),  # type: ignore[misc]
        )

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Runs a change to its end even when its caller goes away; half a change would let a second
        writer in.
        """
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    def _prepared_versions(self, target: int) -> list[int]:
        return sorted(version for kind, version in self._spool.prepared if kind == target)

    def _is_spooled(self, manifest: pb.Manifest) -> bool:
        """Whether the version is on disk; WeightsError when it is not, and too old to be pushed."""
        if self._spool.manifest(manifest.target, manifest.version) is not None:
            return True
        serving = part_version(self.serving, manifest.target)
        if manifest.version in (0, serving) or (
            manifest.target != WEIGHT_TARGET_DRAFTER and manifest.version < serving
        ):
            message = f"{target_name(manifest.target)} versions that may be pushed only grow"
            raise WeightsError(message, seen=manifest.version, allowed=f"> {serving}")
        return False

    def _admit(self, part: Part) -> None:
        """Raises ResourceExhausted when too many versions of the target are on their way."""
        ahead = {one for one in (*self._receiving, *self._spool.prepared) if one[0] == part[0]}
        if len(ahead) >= MAX_IN_FLIGHT:
            seen = ", ".join(sorted(map(_name, ahead)))
            raise ResourceExhausted(
                "too many versions are in flight", seen=seen, allowed=f"{MAX_IN_FLIGHT} a target"
            )

    async def _finish(self, part: Part, received: int) -> pb.PushResponse:
        """Spools and loads a complete version; a second push of the same version finds it done."""
        async with self._writer:
            assembly = self._receiving.get(part)
            if assembly is None:
                if part in self._loaded:
                    return pb.PushResponse(bytes_received=received)
                raise self._not_announced(part)
            if not assembly.complete:
                missing = assembly.missing()
                raise WeightsError(
                    f"{_name(part)} misses {len(missing)} chunks", seen=f"{missing[:8]} and on"
                )
            await self._check_content(part, assembly)
            spool_started_s = time.monotonic()
            await asyncio.to_thread(self._spool.write, assembly.manifest, assembly.buffer)
            del self._receiving[part]
            load_started_s = time.monotonic()
            await self._load(part, written=True)
            return pb.PushResponse(
                bytes_received=received,
                receive_s=assembly.receive_s,
                spool_s=load_started_s - spool_started_s,
                fan_out_s=time.monotonic() - load_started_s,
            )

    async def _check_content(self, part: Part, assembly: Assembly) -> None:
        try:
            await asyncio.to_thread(assembly.check_content)
        except (DataLoss, WeightsError) as error:
            del self._receiving[part]  # no later chunk could repair it
            VERSIONS_REFUSED.record(target=target_name(part[0]))
            _log.error("version_refused", version=_name(part), error=str(error))
            raise

    async def _load(self, part: Part, *, written: bool = False) -> None:
        """Gives a spooled version to the hooks once; not what serves already, nor a version 0
        without a directory.

        Raises DataLoss when it is damaged, unless it was just `written`.
        """
        serves = part[1] == part_version(self.serving, part[0])
        if part in self._loaded or serves or (part[1] == 0 and not self._spool.has(*part)):
            return
        if not written:
            await asyncio.to_thread(self._spool.check, *part)
        await self._hooks.on_prepared(*part, self._spool.path(*part))
        self._loaded.add(part)

    def _awaited(self) -> tuple[int, ...]:
        """The targets whose versions must be here for a commit: not the drafter's where nobody
        knows what has served; workers go without one that is damaged or gone.
        """
        without = WEIGHT_TARGET_DRAFTER if self._spool.unknown else None
        return tuple(target for target in self._targets if target != without)

    def _check_commit(self, versions: VersionSet, targets: tuple[int, ...]) -> None:
        serving = self.serving
        if versions.seq <= serving.seq:
            raise WeightsError(
                "seq of a commit must grow", seen=versions.seq, allowed=f"> {serving.seq}"
            )
        for target in targets:
            version = part_version(versions, target)
            here = {0, part_version(serving, target)}
            if version not in here and not self._spool.has(target, version):
                allowed = sorted(
                    here | {one for kind, one in self._spool.spooled() if kind == target}
                )
                raise WeightsError(
                    f"{target_name(target)} version is not prepared", seen=version, allowed=allowed
                )

    def _forget_older(self, versions: VersionSet) -> None:
        """Nothing below what now serves can be committed as a new version any more."""
        self._loaded = {part for part in self._loaded if part[1] > part_version(versions, part[0])}
        for part in [
            part for part in self._receiving if part[1] <= part_version(versions, part[0])
        ]:
            del self._receiving[part]

    def _not_announced(self, part: Part) -> WeightsError:
        return WeightsError(
            "no Prepare announced this version",
            seen=_name(part),
            allowed=[*map(_name, self._receiving)],
        )


def _name(part: Part) -> str:
    return f"{target_name(part[0])} version {part[1]}"
