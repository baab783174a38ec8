"""The end of every process that code has begun, however it hid. Owns the killing of descendants.

The launcher is a subreaper: a process whose parents have ended becomes its child and cannot get
lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from . import linux


def adopt_orphans() -> None:
    """From now on orphaned descendants become children of this process.

    Raises OSError, also where the kernel does not tell whose children processes are.
    """
    os.stat("/proc/thread-self/children")
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)


def kill_all(group: int, sweep: Callable[[], None]) -> None:
    """Kill and wait for every descendant; `group` is a process group to kill first, `sweep` kills
    what else it can.

    A group dies at once, and so does what `sweep` knows. What has left its group, which only code
    without a system-call filter can, is found by descent, again and again until nothing is left.
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
    """Reaps what has ended already."""
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
