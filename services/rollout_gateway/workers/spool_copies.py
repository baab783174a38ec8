"""Versions of the gateway's spool on a host that has no path to it, copied from the gateway or from
another such host, as the gateway says.

A copy that was broken off goes on where it ended, and counts only once it is what was spooled.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.addresses import spelled
from paceline.config import SecurityConfig
from paceline.errors import DataLoss, DeadlineExceeded, PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.local.ports import way_to
from paceline.rpc import channel, responses, rpc_errors, wait_ready
from paceline.rpc.server import Server
from paceline.services.rollout_gateway.workers.hosts import SERVICE
from paceline.services.rollout_gateway.workers.spool_reading import (
    STALLED_S,
    Copies,
    Copy,
    hash_of_manifest,
)
from paceline.telemetry import get_logger
from paceline.v1 import workers_pb2 as pb
from paceline.v1.engine_pb2 import PrepareWeights
from paceline.v1.workers_pb2_grpc import (
    WorkerHostServiceServicer,
    WorkerHostServiceStub,
    add_WorkerHostServiceServicer_to_server,
)
from paceline.weights.integrity import MANIFEST, check_spooled
from paceline.weights.manifest import target_name
from paceline.whole_files import writing

KEPT = 3
"""Versions of a target that stay here, the newest copied: a worker that starts again reads those
that serve.
"""
TRIES, AGAIN_S = 5, 0.5
"""Calls without a byte after which the gateway is given up, and seconds between two. Another host
has one.
"""
CONNECT_S = 5.0
"""To another host."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A version that is not here."""

    asked: pb.ReadSpooledRequest
    listed: pb.ReadSpooledResponse
    gateway: Any


class SpoolCopies(WorkerHostServiceServicer):
    """Those of one host, which other hosts may copy from. Use on one event loop."""

    def __init__(
        self, spool: Path, directory: Path, host: int, security: SecurityConfig | None = None
    ) -> None:
        """`spool`: the gateway's, as its commands name it; `directory`: of the copies; `security`:
        among these hosts, None where they copy from the gateway alone.
        """
        self._spool = spool
        self._directory = directory
        self._host = host
        self._security = security
        self._one = asyncio.Lock()  # workers prepare a version together
        self._copies = Copies()
        self._server: Server | None = None
        self._address = ""

    async def serve(self, gateway: str) -> str:
        """Has others copy from here, on the interface that leads to the gateway, until `close`;
        returns the address, empty where nobody does. Raises ConfigError.
        """
        async with self._one:
            if self._server is None and self._security is not None:
                own, _ = way_to(gateway)
                own = spelled(own)
                self._server = Server(f"{own}:0", self._security)
                self._server.add(add_WorkerHostServiceServicer_to_server, self, SERVICE)
                self._address = f"{own}:{await self._server.start()}"
        return self._address

    async def close(self) -> None:
        """Nobody copies from here any more."""
        if self._server is not None:
            await self._server.stop(0)

    async def ReadSpooled(
        self, request: pb.ReadSpooledRequest, context: Any
    ) -> AsyncIterator[pb.ReadSpooledResponse]:
        """See Copies.read."""
        async with aclosing(self._copies.read(_name(request), request)) as parts_of_file:
            async for response in parts_of_file:
                yield response

    async def path_of(self, told: PrepareWeights, gateway: Any) -> str:
        """Where the weights of a command are on this host, copied if they lie in the spool: those
        of a run's start do not. Raises as `copy` does.
        """
        if not Path(told.path).is_relative_to(self._spool):
            return told.path
        return str(await self.copy(told.target, told.version, gateway))

    async def copy(self, target: int, version: int, gateway: Any) -> Path:
        """The directory of a version here. One that is here already is asked for its manifest
        alone: a version may have been pushed again with other content. `gateway`: stub of its
        WorkerHostService.

        Raises DataLoss for a copy that is not what was spooled, NotFound where nothing is,
        Unavailable or DeadlineExceeded when the gateway sends nothing, ResourceExhausted where
        nothing can be written.
        """
        asked = pb.ReadSpooledRequest(target=target, version=version)  # type: ignore[arg-type]
        final = self._directory / _name(asked)
        news = final.with_name(f"{final.name}.{MANIFEST}")
        async with self._one:
            listed = await self._list(asked, gateway)
            with writing(final):
                news.parent.mkdir(parents=True, exist_ok=True)
                news.unlink(missing_ok=True)
                await _fetch(gateway, asked, MANIFEST, Copy(news, listed.files), news)
                if _same(final / MANIFEST, news):
                    here = Copy(final, listed.files)
                    here.end()
                    self._copies.add(final.name, here)
                else:
                    asked.manifest = hash_of_manifest(news)
                    await self._make(_Wanted(asked, listed, gateway), news, final)
                news.unlink()
        return final

    async def _list(self, asked: pb.ReadSpooledRequest, gateway: Any) -> pb.ReadSpooledResponse:
        """Files of the version, and where they are to be copied from. Raises DataLoss for a file
        that is elsewhere.
        """
        found = pb.ReadSpooledResponse()
        request = pb.ReadSpooledRequest(host=self._host)
        request.MergeFrom(asked)
        with rpc_errors():
            call = gateway.ReadSpooled(request, timeout=patient(STALLED_S))
            async with aclosing(responses(call)) as stream:
                async for response in stream:
                    found.MergeFrom(response)
        if strange := [name for name in found.files if Path(name).name != name]:
            raise DataLoss("a file of a version lies beside it", seen=strange[0])
        return found

    async def _make(self, wanted: _Wanted, news: Path, final: Path) -> None:
        """Copies what is missing, from another host first if that is said. What one of them has
        sent is left once where the whole is damaged.
        """
        started_s, source = time.monotonic(), wanted.listed.source
        partial = final.with_name(f"{final.name}.partial")
        while True:
            await asyncio.to_thread(_begin, partial, news)
            copy = Copy(partial, wanted.listed.files)
            self._copies.add(final.name, copy)
            try:
                await self._fill(copy, wanted, source)
                await asyncio.to_thread(_complete, partial, final)
                copy.directory = final
                break
            except DataLoss as error:
                if not source:
                    raise
                _log.warning("copied_anew", version=final.name, source=source, error=str(error))
                source = ""
            finally:
                copy.end()
        seconds = round(time.monotonic() - started_s, 3)
        _log.info("version_copied", version=final.name, source=source or "gateway", seconds=seconds)
        await asyncio.to_thread(self._prune, target_name(wanted.asked.target))

    async def _fill(self, copy: Copy, wanted: _Wanted, source: str) -> None:
        """Copies from another host, and the rest from the gateway."""
        names = sorted(copy.files.keys() - {MANIFEST})
        if source and self._security is not None:
            try:
                async with channel(source, self._security) as peer:
                    await wait_ready(peer, patient(CONNECT_S))
                    stub: Any = WorkerHostServiceStub(peer)  # type: ignore[no-untyped-call]
                    for name in names:
                        path = copy.directory / name
                        await _fetch(stub, wanted.asked, name, copy, path, tries=1)
            except PacelineError as error:
                _log.warning("rest_is_copied_from_gateway", source=source, error=str(error))
        for name in names:
            await _fetch(wanted.gateway, wanted.asked, name, copy, copy.directory / name)

    def _prune(self, target: str) -> None:
        """Leaves the newest copies of a target."""
        copies = sorted(self._directory.glob(f"{target}-*/"), key=lambda one: one.stat().st_mtime)
        for old in copies[:-KEPT]:
            shutil.rmtree(old)


async def _fetch(
    stub: Any, asked: pb.ReadSpooledRequest, name: str, copy: Copy, path: Path, tries: int = 0
) -> None:
    """Appends what is missing of the file, in as many calls as bring something; `tries` without
    a byte at most, 0: TRIES.
    """
    tried = 0
    while (start := _size(path)) < copy.files.get(name, 0):
        rest = pb.ReadSpooledRequest(name=name, start=start)
        rest.MergeFrom(asked)
        try:
            await _append(stub, rest, path, copy)
        except (Unavailable, DeadlineExceeded):
            tried = 1 if _size(path) > start else tried + 1
            if tried >= (tries or TRIES):
                raise
            await asyncio.sleep(AGAIN_S)


async def _append(stub: Any, rest: pb.ReadSpooledRequest, path: Path, copy: Copy) -> None:
    loop, stalled_s = asyncio.get_running_loop(), patient(STALLED_S)
    with path.open("ab") as file, rpc_errors():
        try:
            async with (
                asyncio.timeout(stalled_s) as waiting,
                aclosing(responses(stub.ReadSpooled(rest))) as stream,
            ):
                async for response in stream:
                    await asyncio.to_thread(_write, file, response.data)
                    copy.tell()
                    waiting.reschedule(loop.time() + stalled_s)
        except TimeoutError as error:
            message = f"no more of {rest.name} is sent"
            raise DeadlineExceeded(message, seen=f"{stalled_s} s") from error


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()  # others read it meanwhile


def _name(asked: pb.ReadSpooledRequest) -> str:
    return f"{target_name(asked.target)}-{asked.version}"


def _size(path: Path) -> int:
    """Bytes of a file that is there from now on."""
    path.touch()
    return path.stat().st_size


def _same(manifest: Path, other: Path) -> bool:
    return manifest.is_file() and manifest.read_bytes() == other.read_bytes()


def _begin(partial: Path, manifest: Path) -> None:
    """Makes room for a copy, unless one of the same content was broken off there."""
    if not _same(partial / MANIFEST, manifest):
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
