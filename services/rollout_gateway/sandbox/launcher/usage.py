"""What a run takes of the machine, all its processes together: memory, and disk where its directory
lies on the host's. Owns the counting; not who is stopped for it.

RLIMIT_AS bounds one process. Memory that no process's size shows (files in memory, segments, shared
mappings given back but for a page, pages left in pipes) is refused by the system-call filter.
"""

from __future__ import annotations

import os

from .reaping import children, descendants
from .request import RunRequest

_FILL_BYTES_PER_S = 2 << 30  # what one core can fill with pages of 4 KiB
_SHORTEST_S, _LONGEST_S = 0.002, 0.1
_FREE_BYTES, _FREE_FILES = 1 << 30, 10_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


class BoxUsage:
    """One run's."""

    def __init__(self, request: RunRequest, child: int) -> None:
        """`child`: what the launcher has begun; the broker where there are namespaces."""
        self._limit = request.memory_bytes
        self._spaces = "namespaces" in request.layers
        self._box = request.box
        self._child = child
        self._fill = _FILL_BYTES_PER_S * min(os.cpu_count() or 1, request.processes)

    def look(self) -> tuple[bool, float]:
        """Whether the run holds more memory than it may, and seconds after which to look again:
        the nearer to the limit the sooner.

        Raises OSError when the disk of its directory is nearly full; whose fault that is, nobody
        can tell.
        """
        if not self._spaces:  # else it is a file system of its own, of a bounded size
            _check_disk(self._box)
        room = self._room()
        if room < 0:  # a process that forked between two readings was counted twice
            room = self._room()
        return room < 0, min(_LONGEST_S, max(_SHORTEST_S, room / self._fill))

    def _room(self) -> int:
        """Bytes of memory that the run may still take."""
        ours = {self._child, *(children(self._child) if self._spaces else ())}  # broker and guard
        pids = [pid for pid in descendants(os.getpid()) if pid not in ours]
        resident = sum(_resident(pid) for pid in pids)
        if resident > self._limit:  # pages that several share count once then
            resident = sum(_proportional(pid) for pid in pids)
        return self._limit - resident


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0


def _proportional(pid: int) -> int:
    """Resident bytes, of shared ones a share; all of them where a root without CAP_SYS_PTRACE may
    not know.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            fields = (line.split() for line in file)
            return next(int(field[1]) << 10 for field in fields if field[0] == "Pss:")
    except PermissionError:
        return _resident(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _check_disk(box: str) -> None:
    there = os.statvfs(box)
    free = there.f_bavail * there.f_frsize
    if free < _FREE_BYTES or (there.f_files and there.f_favail < _FREE_FILES):
        raise OSError(
            f"the disk of {box} is nearly full: {free} bytes and {there.f_favail} files are free, "
            f"{_FREE_BYTES} and {_FREE_FILES} are kept for others"
        )
