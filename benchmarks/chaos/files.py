"""Watches files appear, by inotify(7), and keeps the files that a verdict needs."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from benchmarks.chaos.remains import HASHES, WEIGHTS, weights_hash
from paceline.errors import Unavailable

_CREATED, _MOVED_HERE = 0x100, 0x80
_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 1 << 16

Seen = Callable[[Path], None]


class FileWatch:
    """Calls back when a file appears in a directory; runs on the current loop until closed."""

    def __init__(self) -> None:
        """Raises Unavailable without inotify."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._handle = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._handle < 0:
            raise Unavailable("no inotify", seen=os.strerror(ctypes.get_errno()))
        self._watched: dict[int, tuple[Path, Seen]] = {}
        asyncio.get_running_loop().add_reader(self._handle, self._read)

    def watch(self, directory: Path, seen: Seen) -> None:
        """Makes the directory; `seen` gets the path of each file made in it or moved there.

        Raises Unavailable if the directory cannot be watched.
        """
        directory.mkdir(parents=True, exist_ok=True)
        mask = _CREATED | _MOVED_HERE
        number = self._libc.inotify_add_watch(self._handle, os.fsencode(directory), mask)
        if number < 0:
            raise Unavailable(f"{directory} cannot be watched", seen=ctypes.get_errno())
        self._watched[number] = directory, seen

    def close(self) -> None:
        """Stops all watches."""
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)

    def _read(self) -> None:
        data, at = os.read(self._handle, _BUFFER_BYTES), 0
        while at < len(data):
            number, _, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            name = os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length
            directory, seen = self._watched[number]
            seen(directory / name)


class Keeper:
    """Links files into its own directory before their writer removes them.

    A link costs no copy, and the bytes stay when the original name is gone. Of weights it keeps
    only the hash, because links of every version would fill a disk.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._count = 0
        self._hashing = ThreadPoolExecutor(1)
        self._hashed: list[Future[None]] = []
        self._hashes: dict[str, str] = {}

    def keep(self, path: Path, *names: str) -> None:
        """Keeps files of a directory that has appeared, as `<its name>@<number>/<file>`.

        Skips a file that is already gone.
        """
        self._count += 1
        kept = self._directory / f"{path.name}@{self._count}"
        kept.mkdir()
        for name in names:
            try:
                os.link(path / name, kept / name)
            except FileNotFoundError:
                continue
            if name == WEIGHTS:
                self._hashed.append(self._hashing.submit(self._hash, kept))

    def close(self) -> None:
        """Writes the hashes, by name of the directory kept."""
        self._hashing.shutdown()
        for one in self._hashed:
            one.result()
        (self._directory / HASHES).write_text(json.dumps(self._hashes))

    def _hash(self, kept: Path) -> None:
        self._hashes[kept.name] = weights_hash(kept / WEIGHTS)
        (kept / WEIGHTS).unlink()
