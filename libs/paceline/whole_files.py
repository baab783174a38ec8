"""Writes files: small ones whole or not at all, and those that outlive a loss of power."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from paceline.errors import ResourceExhausted

TEMPORARY = ".tmp-"
"""Begin of the names of synced files and directories that are not whole yet."""

DISK_FULL = "DISK_FULL"
"""Reason of the error of a file that finds no room."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of a disk, of a user's quota, below a limit on files."""
PART_BYTES = 64 << 20
"""Of a large file that are brought to the disk at a time."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ResourceExhausted when the file cannot be written; its reason is DISK_FULL where there
    is no room, and the same works when there is.
    """
    try:
        yield
    except OSError as error:
        reason = DISK_FULL if error.errno in NO_ROOM else None
        raise ResourceExhausted(f"{path} cannot be written", reason=reason, seen=error) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file that its owner alone can read; a kill leaves the old content or the new. Makes
    its directory. Not synced: a loss of power may leave neither.

    Raises ResourceExhausted as `writing` does.
    """
    temporary = path.with_suffix(".tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def write_synced(
    path: Path,
    *parts: memoryview | bytes | bytearray,
    wrote: Callable[[], None] = lambda: None,
) -> None:
    """Write a file whose bytes are on the disk when this returns; its name is when `sync_path` of
    the directory returns. Calls `wrote` as `write_parts` does.
    """
    with path.open("wb", buffering=0) as file:
        for part in parts:
            write_parts(file, memoryview(part), wrote)
        os.fsync(file.fileno())


def write_parts(file: FileIO, view: memoryview, wrote: Callable[[], None]) -> None:
    """Writes bytes to an unbuffered file; calls `wrote` whenever PART_BYTES more are on the disk.

    So the time between two calls depends on the speed of the disk, and not on the size of the file.
    """
    while len(view) > PART_BYTES:
        part, view = view[:PART_BYTES], view[PART_BYTES:]
        while part:
            part = part[file.write(part) :]
        os.fdatasync(file.fileno())
        wrote()
    while view:
        view = view[file.write(view) :]


def replace_synced(path: Path, content: bytes) -> None:
    """Replace a file; on the disk under its name when this returns. A kill or a loss of power
    leaves the old content or the new. Raises ResourceExhausted as `writing` does.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with writing(path):
        write_synced(temporary, content)
        temporary.replace(path)
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Puts a file, or the names in a directory, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
