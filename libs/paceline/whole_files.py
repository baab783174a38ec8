"""Writes files: small ones whole or not at all, and those that outlive a loss of power."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import ResourceExhausted

TEMPORARY = ".tmp-"
"""Begin of the names of synced files and directories that are not whole yet."""


def write_whole(path: Path, text: str) -> None:
    """Write a file that its owner alone can read; a kill leaves the old content or the new. Makes
    its directory. Not synced: a loss of power may leave neither.

    Raises ResourceExhausted when it cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ResourceExhausted(f"{path} cannot be written", seen=error) from error


def write_synced(path: Path, *parts: memoryview | bytes | bytearray) -> None:
    """Write a file whose bytes are on the disk when this returns; its name is when `sync_path` of
    the directory returns.
    """
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def replace_synced(path: Path, content: bytes) -> None:
    """Replace a file; on the disk under its name when this returns. A kill or a loss of power
    leaves the old content or the new.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
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
