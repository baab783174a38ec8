"""Kills every process that the code has started, however it hid.

The launcher is a subreaper: a process without living parents becomes its child and cannot escape.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from . import linux


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants.

    Raises OSError, also if the kernel does not report children of processes.
    """
    os.stat("/proc/thread-self/children")
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)


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
