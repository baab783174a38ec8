"""Writes small files atomically, and large files that survive a power loss."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from paceline.errors import ResourceExhausted

TEMPORARY = ".tmp-"
"""Name prefix of synced files and directories that are still incomplete."""

DISK_FULL = "DISK_FULL"
"""Reason of the error for a write without free space."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space on the disk, in the user's quota, or below a file size limit."""
PART_BYTES = 64 << 20
"""Bytes of a large file per sync to the disk."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts a failed write in the block to ResourceExhausted.

    The reason is DISK_FULL if space is lacking; the same write succeeds after space is freed.
    """
    try:
        yield
    except OSError as error:
        reason = DISK_FULL if error.errno in NO_ROOM else None
        raise ResourceExhausted(f"{path} cannot be written", reason=reason, seen=error) from error


def write_whole(path: Path, text: str) -> None:
    """Atomically writes a file that only its owner can read, and makes its directory.

    A kill leaves either the old or the new content. The file is not synced, so a power loss may
    leave neither. Raises ResourceExhausted as `writing` does.
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
    """Writes a file and syncs its bytes to the disk before it returns.

    The caller syncs the name with `sync_path` of the directory. Calls `wrote` as `write_parts`
    does.
    """
    with path.open("wb", buffering=0) as file:
        for part in parts:
            write_parts(file, memoryview(part), wrote)
        os.fsync(file.fileno())


def write_parts(file: FileIO, view: memoryview, wrote: Callable[[], None]) -> None:
    """Writes bytes to an unbuffered file; calls `wrote` after each PART_BYTES synced to the disk.

    So the time between two calls depends on the disk's speed and not on the file's size.
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
    """Atomically replaces a file and syncs it with its name before it returns.

    A kill or a power loss leaves either the old or the new content. Raises ResourceExhausted as
    `writing` does.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with writing(path):
        write_synced(temporary, content)
        temporary.replace(path)
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Syncs a file, or a directory's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
