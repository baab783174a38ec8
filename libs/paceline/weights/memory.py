"""Memory for whole versions, and the available amount."""

from __future__ import annotations

import mmap
from pathlib import Path

from paceline.errors import ResourceExhausted

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def allocate(nbytes: int) -> memoryview:
    """Zeroed memory in a mapping of its own, so it returns to the system when dropped. Uses huge
    pages if offered.

    Raises ResourceExhausted.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise ResourceExhausted("no memory for a version", seen=nbytes) from error
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2 << 20:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def available_bytes() -> int:
    """Bytes that the system could provide without swapping, within this container's limit if there
    is one. A very large number if the system does not report it.
    """
    system = _field(_MEMINFO, "MemAvailable:")
    found = system << 10 if system is not None else 1 << 62
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no limit, or "max"
        return found
    cached = _field(_GROUP / "memory.stat", "inactive_file") or 0
    return max(0, min(found, limit - used + cached))


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(one.split()[1]) for one in lines if one.startswith(name)), None)
