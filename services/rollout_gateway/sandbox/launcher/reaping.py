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
    """From now on orphaned descendants become children of this process. Raises OSError."""
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
        for pid in _descendants():
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


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name in parentheses may hold anything, so count from its end: state, then the
            # parent.
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, new = [], [os.getpid()]
    while new:
        new = [child for pid in new for child in children.get(pid, [])]
        found += new
    return found
