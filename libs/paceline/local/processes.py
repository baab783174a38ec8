"""Ties child processes to their parent, signals their group and describes how they ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from pathlib import Path

from paceline.errors import InternalError

PARENT_VARIABLE = "PACELINE_PARENT_PID"
"""Set by whoever starts a child; the child ends when that process is gone."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(death_signal: int = signal.SIGKILL) -> bool:
    """Ask the kernel to signal this process when its parent dies; False without a parent that asked
    for it.

    Linux only; elsewhere False. The setting survives exec. Exits at once when the parent is gone
    already.
    """
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent or sys.platform != "linux":
        return False
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise InternalError("prctl(PR_SET_PDEATHSIG) failed", seen=os.strerror(ctypes.get_errno()))
    if os.getppid() != int(parent) and not _exists(int(parent)):
        raise SystemExit(1)
    return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def child_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment of a child that is to die with this process."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid()), **(extra or {})}


def signal_group(pid: int, number: int) -> bool:
    """Signal the process group of a child that leads one; False when the group is gone."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True


def last_lines(path: Path, count: int = 15) -> str:
    """The end of a log file; "" when there is none."""
    try:
        with path.open(errors="replace") as lines:
            return "".join(deque(lines, maxlen=count)).rstrip()
    except FileNotFoundError:
        return ""


def describe_exit(code: int) -> str:
    """An exit status in words."""
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    )


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
