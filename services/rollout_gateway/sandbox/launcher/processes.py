"""Counts the resources of a run's processes, and kills every process that the code has started.

The launcher is a subreaper: a process without living parents becomes its child and cannot escape.

RLIMIT_AS bounds one process. The system-call filter refuses memory outside of any process's size:
files in memory, segments, mostly unmapped shared mappings, pages left in pipes.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from .request import RunRequest


def kill_all(group: int, sweep: Callable[[], None]) -> None:
    """Kills and reaps every descendant. `group` is a process group to kill first; `sweep` kills
    further processes.

    A group dies at once, and so do the processes of `sweep`. A process outside its group, possible
    only without a system-call filter, is found by descent, repeatedly until none is left.
    """
    while _has_children():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        sweep()
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _has_children() -> bool:
    """Whether this process has children; reaps finished ones."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def children(pid: int) -> list[int]:
    """Process ids of a process's children; none when it has ended."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all that come from a process."""
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children(parent)]
        found += new
    return found


_FILL_BYTES_PER_S = 2 << 30  # bytes that one core can fill in pages of 4 KiB
_SHORTEST_S, _LONGEST_S = 0.002, 0.1
_FREE_BYTES, _FREE_FILES = 1 << 30, 10_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


class BoxUsage:
    """Usage of one run."""

    def __init__(self, request: RunRequest, child: int) -> None:
        """`child`: the launcher's child; the broker if there are namespaces."""
        self._limit = request.memory_bytes
        self._spaces = "namespaces" in request.layers
        self._box = request.box
        self._child = child
        self._fill = _FILL_BYTES_PER_S * min(os.cpu_count() or 1, request.processes)

    def look(self) -> tuple[bool, float]:
        """Whether the run exceeds its memory, and seconds until the next check, fewer near the
        limit.

        Raises OSError when the disk of its directory is nearly full, from any cause.
        """
        if not self._spaces:  # otherwise it is a separate file system of bounded size
            _check_disk(self._box)
        room = self._room()
        if room < 0:  # a process that forked between two readings was counted twice
            room = self._room()
        return room < 0, min(_LONGEST_S, max(_SHORTEST_S, room / self._fill))

    def _room(self) -> int:
        """Bytes of memory that the run may still use."""
        ours = {self._child, *(children(self._child) if self._spaces else ())}  # broker and guard
        pids = [pid for pid in descendants(os.getpid()) if pid not in ours]
        resident = sum(_resident(pid) for pid in pids)
        if resident > self._limit:  # then shared pages count once
            resident = sum(_proportional(pid) for pid in pids)
        return self._limit - resident


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0


def _proportional(pid: int) -> int:
    """Resident bytes with shares of shared pages; all of them if a root without CAP_SYS_PTRACE
    cannot read shares.
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
