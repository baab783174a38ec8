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
from paceline.weights import Spool
from paceline.weights.integrity import MANIFEST, check_spooled
from paceline.weights.manifest import target_name

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
    """The host's end. Use on one event loop; `stub` is of the WorkerHostService."""

    def __init__(self, spool: Path, directory: Path) -> None:
        """`spool`: the gateway's, as its commands name it; `directory`: of the copies."""
        self._spool = spool
        self._directory = directory
        self._one = asyncio.Lock()  # workers prepare a version together

    def covers(self, path: str) -> bool:
        """Whether a command's path is in the gateway's spool."""
        return Path(path).is_relative_to(self._spool)

    async def copy(self, stub: Any, target: int, version: int) -> Path:
        """The directory of a version here. One that is here already is asked for its manifest
        alone: a version may have been pushed again with other content.

        Raises DataLoss for a copy that is not what was spooled, NotFound where nothing is,
        Unavailable when the gateway sends nothing, OSError for a full disk.
        """
        async with self._one:
            asked = pb.ReadSpooledRequest(target=target, version=version)  # type: ignore[arg-type]
            files = await self._files(stub, asked)
            final = self._directory / f"{target_name(target)}-{version}"
            partial = final.with_name(f"{final.name}.partial")
            news = self._directory / f"{final.name}.{MANIFEST}"
            news.unlink(missing_ok=True)
            self._directory.mkdir(parents=True, exist_ok=True)
            await self._fetch(stub, asked, MANIFEST, files, news)
            if not _has(final, news):
                if not _has(partial, news):
                    await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
                partial.mkdir(exist_ok=True)
                shutil.copyfile(news, partial / MANIFEST)
                for name in files.keys() - {MANIFEST}:
                    await self._fetch(stub, asked, name, files, partial / name)
                await asyncio.to_thread(_complete, partial, final)
                await asyncio.to_thread(self._prune, target_name(target))
            news.unlink()
            return final

    async def _files(self, stub: Any, asked: pb.ReadSpooledRequest) -> Mapping[str, int]:
        with rpc_errors():
            call = stub.ReadSpooled(asked, timeout=patient(STALLED_S))
            async with aclosing(responses(call)) as stream:
                async for response in stream:
                    return dict(response.files)
        raise NotFound("no files of a spooled version", seen=asked.version)

    async def _fetch(
        self,
        stub: Any,
        asked: pb.ReadSpooledRequest,
        name: str,
        files: Mapping[str, int],
        path: Path,
    ) -> None:
        """Appends what is missing of the file, in as many calls as bring something."""
        tries = 0
        while (start := _size(path)) < files.get(name, 0):
            rest = pb.ReadSpooledRequest(name=name, start=start)
            rest.MergeFrom(asked)
            try:
                await self._append(stub, rest, path)
            except (Unavailable, DeadlineExceeded):
                tries = 1 if _size(path) > start else tries + 1
                if tries == TRIES:
                    raise
                await asyncio.sleep(AGAIN_S)

    async def _append(self, stub: Any, rest: pb.ReadSpooledRequest, path: Path) -> None:
        loop, stalled_s = asyncio.get_running_loop(), patient(STALLED_S)
        with path.open("ab") as file, rpc_errors():
            try:
                async with (
                    asyncio.timeout(stalled_s) as waiting,
                    aclosing(responses(stub.ReadSpooled(rest))) as stream,
                ):
                    async for response in stream:
                        await asyncio.to_thread(file.write, response.data)
                        waiting.reschedule(loop.time() + stalled_s)
            except TimeoutError as error:
                message = f"the gateway sends no more of {rest.name}"
                raise DeadlineExceeded(message, seen=f"{stalled_s:.0f} s") from error

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


def _complete(partial: Path, final: Path) -> None:
    """Makes a copy count. Raises DataLoss for a damaged one, of which nothing is kept."""
    try:
        check_spooled(partial)
    except DataLoss:
        shutil.rmtree(partial)
        raise
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
