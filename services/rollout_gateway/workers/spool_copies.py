"""Versions of the gateway's spool on a host that has no path to it: both ends of ReadSpooled.

A copy that was broken off goes on where it ended, and counts only once it is what was spooled.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from paceline.errors import DataLoss, DeadlineExceeded, InvalidInput, NotFound, Unavailable
from paceline.local.patience import patient
from paceline.rpc import responses, rpc_errors
from paceline.services.rollout_gateway.workers.parts import PART_BYTES
from paceline.v1 import workers_pb2 as pb
from paceline.v1.engine_pb2 import PrepareWeights
from paceline.weights import Spool
from paceline.weights.integrity import MANIFEST, check_spooled
from paceline.weights.manifest import target_name
from paceline.whole_files import writing

KEPT = 3
"""Versions of a target that stay here, the newest copied: a worker that starts again reads those
that serve.
"""
TRIES, AGAIN_S = 5, 0.5
"""Calls without a byte after which a copy is given up, and seconds between two."""
STALLED_S = 30.0
"""Seconds without a byte after which a call is."""


async def read_spooled(
    spool: Spool, request: pb.ReadSpooledRequest
) -> AsyncGenerator[pb.ReadSpooledResponse]:
    """The gateway's end. Raises NotFound for a version or a file that is not there, InvalidInput
    for a start behind the file's end.
    """
    if (request.target, request.version) not in (there := spool.spooled()):
        seen = (request.target, request.version)
        raise NotFound("no such version is spooled", seen=seen, allowed=sorted(there))
    directory = spool.path(request.target, request.version)
    files = await asyncio.to_thread(_sizes, directory)
    if not request.name:
        yield pb.ReadSpooledResponse(files=files)
        return
    size = files.get(request.name)
    if size is None:
        message = "no such file of a spooled version"
        raise NotFound(message, seen=request.name, allowed=sorted(files))
    if request.start > size:
        raise InvalidInput("the file ends before", seen=request.start, allowed=f"0 to {size}")
    with (directory / request.name).open("rb") as file:
        file.seek(request.start)
        while data := await asyncio.to_thread(file.read, PART_BYTES):
            yield pb.ReadSpooledResponse(data=data)


class SpoolCopies:
    """The host's end. Use on one event loop."""

    def __init__(self, spool: Path, directory: Path) -> None:
        """`spool`: the gateway's, as its commands name it; `directory`: of the copies."""
        self._spool = spool
        self._directory = directory
        self._one = asyncio.Lock()  # workers prepare a version together
        self.stub: Any = None
        """Of the WorkerHostService, while the host has joined it."""

    async def path_of(self, told: PrepareWeights) -> str:
        """Where the weights of a command are on this host, copied if they lie in the spool: those
        of a run's start do not. Raises as `copy` does.
        """
        if not Path(told.path).is_relative_to(self._spool):
            return told.path
        return str(await self.copy(told.target, told.version))

    async def copy(self, target: int, version: int) -> Path:
        """The directory of a version here. One that is here already is asked for its manifest
        alone: a version may have been pushed again with other content.

        Raises DataLoss for a copy that is not what was spooled, NotFound where nothing is,
        Unavailable or DeadlineExceeded when the gateway sends nothing, ResourceExhausted where
        nothing can be written.
        """
        asked = pb.ReadSpooledRequest(target=target, version=version)  # type: ignore[arg-type]
        final = self._directory / f"{target_name(target)}-{version}"
        partial = final.with_name(f"{final.name}.partial")
        news = final.with_name(f"{final.name}.{MANIFEST}")
        async with self._one:
            files = await self._files(asked)
            with writing(final):
                news.parent.mkdir(parents=True, exist_ok=True)
                news.unlink(missing_ok=True)
                await self._fetch(asked, MANIFEST, files, news)
                if not _has(final, news):
                    await asyncio.to_thread(_begin, partial, news)
                    for name in files.keys() - {MANIFEST}:
                        await self._fetch(asked, name, files, partial / name)
                    await asyncio.to_thread(_complete, partial, final)
                    await asyncio.to_thread(self._prune, target_name(target))
                news.unlink()
        return final

    async def _files(self, asked: pb.ReadSpooledRequest) -> Mapping[str, int]:
        """Bytes of each file of the version by name. Raises DataLoss for one that is elsewhere."""
        found: dict[str, int] = {}
        with rpc_errors():
            call = self.stub.ReadSpooled(asked, timeout=patient(STALLED_S))
            async with aclosing(responses(call)) as stream:
                async for response in stream:
                    found |= response.files
        if strange := [name for name in found if Path(name).name != name]:
            raise DataLoss("a file of a version lies beside it", seen=strange[0])
        return found

    async def _fetch(
        self, asked: pb.ReadSpooledRequest, name: str, files: Mapping[str, int], path: Path
    ) -> None:
        """Appends what is missing of the file, in as many calls as bring something."""
        tries = 0
        while (start := _size(path)) < files.get(name, 0):
            rest = pb.ReadSpooledRequest(name=name, start=start)
            rest.MergeFrom(asked)
            try:
                await self._append(rest, path)
            except (Unavailable, DeadlineExceeded):
                tries = 1 if _size(path) > start else tries + 1
                if tries == TRIES:
                    raise
                await asyncio.sleep(AGAIN_S)

    async def _append(self, rest: pb.ReadSpooledRequest, path: Path) -> None:
        loop, stalled_s = asyncio.get_running_loop(), patient(STALLED_S)
        with path.open("ab") as file, rpc_errors():
            try:
                async with (
                    asyncio.timeout(stalled_s) as waiting,
                    aclosing(responses(self.stub.ReadSpooled(rest))) as stream,
                ):
                    async for response in stream:
                        await asyncio.to_thread(file.write, response.data)
                        waiting.reschedule(loop.time() + stalled_s)
            except TimeoutError as error:
                message = f"the gateway sends no more of {rest.name}"
                raise DeadlineExceeded(message, seen=f"{stalled_s} s") from error

    def _prune(self, target: str) -> None:
        """Leaves the newest copies of a target."""
        copies = sorted(self._directory.glob(f"{target}-*/"), key=lambda one: one.stat().st_mtime)
        for old in copies[:-KEPT]:
            shutil.rmtree(old)


def _size(path: Path) -> int:
    """Bytes of a file that is there from now on."""
    path.touch()
    return path.stat().st_size


def _sizes(directory: Path) -> dict[str, int]:
    return {one.name: one.stat().st_size for one in directory.iterdir() if one.is_file()}


def _has(directory: Path, manifest: Path) -> bool:
    own = directory / MANIFEST
    return own.is_file() and own.read_bytes() == manifest.read_bytes()


def _begin(partial: Path, manifest: Path) -> None:
    """Makes room for a copy, unless one of the same content was broken off there."""
    if not _has(partial, manifest):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        shutil.copyfile(manifest, partial / MANIFEST)


def _complete(partial: Path, final: Path) -> None:
    """Makes a copy count. Raises DataLoss for a damaged one, of which nothing is kept."""
    try:
        check_spooled(partial)
    except DataLoss:
        shutil.rmtree(partial)
        raise
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
