"""Versions in transit: arriving, prepared and serving ones. One writer.

The hooks apply versions to workers; the spool keeps them on disk.
"""

import asyncio
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from paceline.errors import DataLoss, ResourceExhausted, WeightsError
from paceline.rpc.progress import Activity
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1 import weights_pb2 as pb
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.weights.assembly import Assembly
from paceline.weights.committed_sets import Part, part_version
from paceline.weights.delta import check_base, rebuilt
from paceline.weights.manifest import target_name, whole_of
from paceline.weights.metrics import VERSIONS_REFUSED, VERSIONS_REPLACED
from paceline.weights.spool import Spool

_log = get_logger(__name__)

MAX_IN_FLIGHT = 2
"""Versions of one target that may be arriving or prepared at a time."""


class WeightHooks(Protocol):
    """Actions of the receiving service on versions. Calls never overlap."""

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        """Loads a spooled version beside the serving one, on every worker.

        An exception fails the Push.
        """
        ...

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None:
        """Serves the set on every worker; on_prepared was called for all parts. A trainer has the
        slots of `leased` workers. `judge`: whether a canary tests the set first; None: the hook
        decides.

        An exception fails the Commit.
        """
        ...

    async def on_abort(self, target: int, version: int) -> None:
        """Drops a version passed to on_prepared."""
        ...


class Reception:
    """Receives versions into a spool and passes them to the hooks.

    A change must run to its end: a cancelled one would let a second writer in.
    """

    def __init__(self, spool: Spool, hooks: WeightHooks, targets: tuple[int, ...]) -> None:
        """`targets`: the parts that a commit needs."""
        self._spool = spool
        self._hooks = hooks
        self._targets = targets
        self._receiving: dict[Part, Assembly] = {}
        self._loaded: set[Part] = set()  # passed to on_prepared, not yet committed or aborted
        self._writer = asyncio.Lock()
        self._at_work = 0
        self.activity = Activity("weights")
        """The current work on versions. Each part that arrives or is written counts as progress."""

    @contextmanager
    def working(self, doing: str) -> Iterator[None]:
        """The block works on a version."""
        self._at_work += 1
        self.activity.begins(doing)
        try:
            yield
        finally:
            self._at_work -= 1
            if not self._at_work:
                self.activity.begins("")

    @property
    def serving(self) -> VersionSet:
        """The serving set; version 0 of each part before the first commit."""
        return self._spool.sets.serves

    async def prepare(self, manifest: pb.Manifest) -> pb.PrepareResponse:
        """Allocates the buffer of a version and returns the chunks still wanted.

        Raises WeightsError with reason DELTA_BASE for a delta without its base, ResourceExhausted
        if the version finds no room.
        """
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
                ahead = sum(one.manifest.total_bytes for one in self._receiving.values())
                self._spool.check_room(manifest.total_bytes + ahead)
                if manifest.encoding == pb.WEIGHT_ENCODING_SPARSE_DELTA:
                    await asyncio.to_thread(check_base, self._spool, manifest)
                assembly = self._receiving[part] = Assembly(manifest, self._spool.room_for)
            return pb.PrepareResponse(wanted_chunks=assembly.wanted(), replaced=replaced)

    def receiving(self, part: Part, known: Assembly | None = None) -> Assembly:
        """The assembly of an announced version. Raises WeightsError if none was announced, or a
        different one since `known`.
        """
        assembly = self._receiving.get(part)
        if assembly is None or (known is not None and assembly is not known):
            raise self._not_announced(part)
        self.activity.moves()
        return assembly

    async def finish(self, part: Part, received: int) -> pb.PushResponse:
        """Spools and loads a version once it is complete. An earlier caller gets the number of
        missing chunks; a later one finds the work done.
        """
        async with self._writer:
            assembly = self._receiving.get(part)
            if assembly is None:
                if part in self._loaded:
                    return pb.PushResponse(bytes_received=received)
                raise self._not_announced(part)
            if not assembly.complete:
                missing = len(assembly.missing())
                return pb.PushResponse(bytes_received=received, missing_chunks=missing)
            apply_started_s = time.monotonic()
            content = await self._content(part, assembly)
            spool_started_s = time.monotonic()
            self.activity.moves()
            whole = whole_of(assembly.manifest)
            await asyncio.to_thread(self._spool.write, whole, content)
            del self._receiving[part]
            load_started_s = time.monotonic()
            self.activity.moves()
            await self._load_and_sync(part)
            return pb.PushResponse(
                bytes_received=received,
                receive_s=assembly.receive_s,
                apply_s=spool_started_s - apply_started_s if assembly.is_delta else 0.0,
                spool_s=load_started_s - spool_started_s,
                fan_out_s=time.monotonic() - load_started_s,
            )

    async def commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None:
        """Serves a set: workers first, then versions.json. Serving the present set again has no
        effect. The set before the present one may serve again, although its seq is smaller. Raises
        WeightsError for a part that is not prepared or a seq that does not grow, and the errors of
        the hooks.
        """
        async with self._writer:
            if versions != self._spool.sets.serving:
                targets = self._awaited()
                self._check_commit(versions, targets)
                for target in targets:
                    await self._load((target, part_version(versions, target)))
                await self._hooks.on_commit(versions, mode, leased, judge=judge)
                await asyncio.to_thread(self._spool.commit, versions)
                self._forget_older(versions)

    async def abort(self, part: Part) -> None:
        """Drops a version; an absent one counts as dropped. Raises WeightsError when it
        is serving.
        """
        async with self._writer:
            if part[1] == part_version(self.serving, part[0]):
                message = "a serving version cannot be aborted"
                raise WeightsError(message, seen=_name(part), allowed="a prepared version")
            await self._forget(part)

    async def _remove_damaged(self, part: Part) -> bool:
        """Whether the spooled version, serving or not, must be pushed again."""
        try:
            await asyncio.to_thread(self._spool.check, *part)
        except DataLoss:
            await asyncio.to_thread(self._spool.remove, *part)
            return True
        return False

    async def _make_way(self, manifest: pb.Manifest) -> bool:
        """Drops another content of the same version; returns False if there is none.

        Raises WeightsError when a kept set contains the version, since a served content never
        changes.
        """
        part = (manifest.target, manifest.version)
        assembly = self._receiving.get(part)
        known = whole_of(assembly.manifest) if assembly else self._spool.manifest(*part)
        if known is None or known == whole_of(manifest):
            if assembly is not None and assembly.manifest != manifest:
                del self._receiving[part]  # the same content now arrives in another encoding
            return False
        if assembly is None and part not in self._spool.prepared:
            message = f"{_name(part)} is kept with other content"
            raise WeightsError(message, seen=manifest.content_hash, allowed=known.content_hash)
        VERSIONS_REPLACED.record(target=target_name(part[0]))
        _log.warning("version_replaced", version=_name(part))
        await self._forget(part)
        return True

    async def _forget(self, part: Part) -> None:
        self._receiving.pop(part, None)
        if part in self._loaded:
            await self._hooks.on_abort(*part)
            self._loaded.discard(part)
        await asyncio.to_thread(self._spool.discard, *part)

    def _is_spooled(self, manifest: pb.Manifest) -> bool:
        """Whether the version is on disk. Raises WeightsError when it is absent and too old to be
        pushed.
        """
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
        """Raises ResourceExhausted when too many versions of the target are in transit."""
        ahead = {one for one in (*self._receiving, *self._spool.prepared) if one[0] == part[0]}
        if len(ahead) >= MAX_IN_FLIGHT:
            seen = ", ".join(sorted(map(_name, ahead)))
            message = "too many versions are in flight"
            raise ResourceExhausted(message, seen=seen, allowed=f"{MAX_IN_FLIGHT} a target")

    async def _content(self, part: Part, assembly: Assembly) -> memoryview:
        """The whole content of a complete version."""
        try:
            await asyncio.to_thread(assembly.check_content)
            if not assembly.is_delta:
                return assembly.buffer
            return await asyncio.to_thread(rebuilt, self._spool, assembly.manifest, assembly.buffer)
        except (DataLoss, WeightsError) as error:
            del self._receiving[part]  # no later chunk could repair it
            VERSIONS_REFUSED.record(target=target_name(part[0]))
            _log.error("version_refused", version=_name(part), error=str(error))
            raise

    async def _load(self, part: Part, *, written: bool = False) -> None:
        """Passes a spooled version to the hooks once. A serving version and a version 0 without a
        directory are skipped.

        Raises DataLoss when it is damaged, unless it was just `written`.
        """
        serves = part[1] == part_version(self.serving, part[0])
        if part in self._loaded or serves or (part[1] == 0 and not self._spool.has(*part)):
            return
        if not written:
            await asyncio.to_thread(self._spool.check, *part)
        await self._hooks.on_prepared(*part, self._spool.path(*part))
        self._loaded.add(part)

    async def _load_and_sync(self, part: Part) -> None:
        """Loads a written version while it is synced to the disk. Drops a version that the disk
        does not keep. Raises the errors of the hooks, and ResourceExhausted.
        """
        sync = asyncio.to_thread(self._spool.sync, *part, self.activity.moves)
        syncing = asyncio.create_task(sync)
        try:
            await self._load(part, written=True)
        finally:
            try:
                await syncing
            except ResourceExhausted:
                await self._forget(part)
                raise

    def _awaited(self) -> tuple[int, ...]:
        """Targets that must be present for a commit. The drafter is left out while the serving set
        is unknown; workers run without a drafter that is damaged or gone.
        """
        without = WEIGHT_TARGET_DRAFTER if self._spool.sets.unknown else None
        return tuple(target for target in self._targets if target != without)

    def _check_commit(self, versions: VersionSet, targets: tuple[int, ...]) -> None:
        serving = self.serving
        if versions.seq <= serving.seq and versions != self._spool.sets.former:
            message = "seq of a commit must grow"
            raise WeightsError(message, seen=versions.seq, allowed=f"> {serving.seq}")
        for target in targets:
            version = part_version(versions, target)
            here = {0, part_version(serving, target)}
            if version not in here and not self._spool.has(target, version):
                allowed = sorted(
                    here | {one for kind, one in self._spool.spooled() if kind == target}
                )
                message = f"{target_name(target)} version is not prepared"
                raise WeightsError(message, seen=version, allowed=allowed)

    def _forget_older(self, versions: VersionSet) -> None:
        """Drops versions up to the serving ones, since they can no longer be committed as new."""

        def is_newer(part: Part) -> bool:
            return part[1] > part_version(versions, part[0])

        self._loaded = set(filter(is_newer, self._loaded))
        self._receiving = {part: one for part, one in self._receiving.items() if is_newer(part)}

    def _not_announced(self, part: Part) -> WeightsError:
        return WeightsError(
            "no Prepare announced this version",
            seen=_name(part),
            allowed=[*map(_name, self._receiving)],
        )


def _name(part: Part) -> str:
    return f"{target_name(part[0])} version {part[1]}"
