"""Sends files of spooled versions to hosts that have no path to the spool: the gateway from its
spool, a host from its copies, those too that are still being made. Says who reads from whom.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from hashlib import sha256
from pathlib import Path

from paceline.errors import InvalidInput, NotFound, Unavailable
from paceline.local.patience import patient
from paceline.services.rollout_gateway.workers.parts import PART_BYTES
from paceline.v1 import workers_pb2 as pb
from paceline.weights import Spool
from paceline.weights.integrity import MANIFEST

STALLED_S = 30.0
"""Seconds without a byte after which who sends none is given up."""
BEGINS_S = 5.0
"""Seconds until a host that is asked for a version has begun to copy it: all are told at once."""


def source_of(host: int, addresses: Mapping[int, str], fan_out: int) -> str:
    """Address that a host copies from; empty: the gateway's. `addresses`: where hosts that are
    there can be copied from, by number; empty for those that cannot. The tree is filled level by
    level, in the order of the numbers: none waits for itself.
    """
    there = [one for one in sorted(addresses) if addresses[one] or one == host]
    place = there.index(host) if host in there else 0
    return addresses[there[place // fan_out - 1]] if 0 < fan_out <= place else ""


def hash_of_manifest(path: Path) -> str:
    """By which hosts know that they speak of the same content: sha256 in hexadecimal digits."""
    return sha256(path.read_bytes()).hexdigest()


def sizes(directory: Path) -> dict[str, int]:
    """Bytes of each file there by name."""
    return {one.name: one.stat().st_size for one in directory.iterdir() if one.is_file()}


async def read_spooled(
    spool: Spool, request: pb.ReadSpooledRequest, source: str
) -> AsyncGenerator[pb.ReadSpooledResponse]:
    """The gateway's end; `source`: where the version is to be copied from. Raises NotFound for a
    version or a file that is not there, InvalidInput for a start behind the file's end.
    """
    if (request.target, request.version) not in (there := spool.spooled()):
        seen = (request.target, request.version)
        raise NotFound("no such version is spooled", seen=seen, allowed=sorted(there))
    directory = spool.path(request.target, request.version)
    files = await asyncio.to_thread(sizes, directory)
    if not request.name:
        yield pb.ReadSpooledResponse(files=files, source=source)
        return
    copy = Copy(directory, files)
    copy.end()
    async for data in copy.read(request.name, request.start):
        yield pb.ReadSpooledResponse(data=data)


class Copy:
    """A version's files in a directory, for those who read them while they are still coming. Use on
    one event loop.
    """

    def __init__(self, directory: Path, files: Mapping[str, int]) -> None:
        """`files`: bytes of each when it is whole, by name."""
        self.directory = directory
        self.files = dict(files)
        self._over = False
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Something has been written."""
        self._news.set()
        self._news = asyncio.Event()

    def end(self) -> None:
        """No more will be written."""
        self._over = True
        self.tell()

    def has(self, manifest: str) -> bool:
        """Whether its manifest.json has this hash."""
        try:
            return hash_of_manifest(self.directory / MANIFEST) == manifest
        except FileNotFoundError:
            return False

    async def read(self, name: str, start: int) -> AsyncGenerator[bytes]:
        """Bytes of a file from `start` on, as they come. Raises NotFound, InvalidInput, and
        Unavailable where no more come.
        """
        size = self.files.get(name)
        if size is None:
            message = "no such file of a spooled version"
            raise NotFound(message, seen=name, allowed=sorted(self.files))
        if start > size:
            raise InvalidInput("the file ends before", seen=start, allowed=f"0 to {size}")
        while start < size:
            news, over = self._news, self._over
            if data := await asyncio.to_thread(_read, self.directory / name, start):
                yield data
                start += len(data)
            elif over:
                raise Unavailable("the copy ends here", seen=f"{start} of {size} bytes of {name}")
            else:
                await _within(STALLED_S, news, f"no more of {name} has come here")


class Copies:
    """Those of one host. Use on one event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, Copy] = {}
        self._news = asyncio.Event()

    def add(self, name: str, copy: Copy) -> None:
        """It may be read from now on, in the place of an older one; those that are gone may not."""
        there = {one: old for one, old in self._by_name.items() if old.directory.is_dir()}
        self._by_name = {**there, name: copy}
        self._news.set()
        self._news = asyncio.Event()

    async def read(
        self, name: str, request: pb.ReadSpooledRequest
    ) -> AsyncGenerator[pb.ReadSpooledResponse]:
        """The host's end. Waits for a copy that has not begun. Raises as Copy.read, and Unavailable
        where none begins.
        """
        while (copy := self._by_name.get(name)) is None or not copy.has(request.manifest):
            await _within(BEGINS_S, self._news, f"no copy of {name} is made here")
        async for data in copy.read(request.name, request.start):
            yield pb.ReadSpooledResponse(data=data)


async def _within(most_s: float, news: asyncio.Event, otherwise: str) -> None:
    limit_s = patient(most_s)
    try:
        async with asyncio.timeout(limit_s):
            await news.wait()
    except TimeoutError as error:
        raise Unavailable(otherwise, seen=f"{limit_s} s") from error


def _read(path: Path, start: int) -> bytes:
    """At most a part; nothing where there is no more yet."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(PART_BYTES)
    except FileNotFoundError:
        return b""
