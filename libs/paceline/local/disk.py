"""Checks whether a directory's disk has room for a run to continue."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from paceline.whole_files import NO_ROOM

ROOM_BYTES = 32 << 20
"""Minimum free bytes: a batch of trajectories, a rewritten log."""


def lack_of_room(directory: Path) -> str:
    """Describes a full disk, quota or file size limit; "" if there is room."""
    usage, why = shutil.disk_usage(directory), "the disk is full"
    if usage.free >= ROOM_BYTES:
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
                left = memoryview(bytes(ROOM_BYTES))
                while left:
                    left = left[probe.write(left) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            why = error.strerror or why
        else:
            return ""
    free, total = usage.free / 2**20, usage.total / 2**20
    return (
        f"{why}: {free:.1f} MiB free of {total:.0f} MiB where {directory} lies, "
        f"{ROOM_BYTES >> 20} MiB needed; the run goes on when there is room"
    )
