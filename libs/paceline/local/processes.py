"""Ties child processes to their parent and describes their exit, and gives a run directory one
owner per name: a lock on `pids/<name>.pid`. The kernel releases it at any end of the process.
"""

import ctypes
import fcntl
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from paceline.errors import ConfigError, FailedPrecondition, InternalError

PARENT_VARIABLE = "PACELINE_PARENT_PID"
"""Process id of the parent, set by the parent. The child ends when that process is gone."""
NEWS_VARIABLE = "PACELINE_NEWS_FD"
"""File descriptor of the write end of the pipe to the supervisor (news.py); "" without one."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Loopback network interface."""
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
"""Environment that restricts torch's ranks to loopback."""
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_RUN_FAILED = 3
EXIT_FULL = 4
"""Exit statuses of a service: 2 and 3 would recur after a restart, 4 may clear at any time."""

_MEANINGS = {
    EXIT_CONFIG: "a wrong setting",
    EXIT_RUN_FAILED: "the run failed",
    EXIT_FULL: "memory or disk is full",
}
MAX_LINE_BYTES = 64 << 20
"""Maximum bytes of one line between a piped program and its parent."""
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 1 << 16
_NOT_SHOWN = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")
_ERROR = re.compile(r"fatal|terminate|assert|error", re.IGNORECASE)
_CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGSEGV}


def die_with_parent() -> bool:
    """Requests SIGKILL from the kernel for this process at its parent's death.

    Returns False without PACELINE_PARENT_PID, and on systems other than Linux. The setting survives
    exec. Exits at once if the parent is already gone. Raises InternalError if the kernel refuses.
    """
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent or sys.platform != "linux":
        return False
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise InternalError("prctl(PR_SET_PDEATHSIG) failed", seen=os.strerror(ctypes.get_errno()))
    if os.getppid() != int(parent) and not exists(int(parent)):
        raise SystemExit(1)
    return True


def reserve_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers) of a piped program (child.py): its stdin and stdout. Afterwards
    descriptor 0 is empty and descriptor 1 is stderr.

    The program dies with its parent (on Linux; elsewhere the closed pipe ends it between requests).
    It ignores keyboard interrupts, because its parent ends it.
    """
    requests, answers = os.dup(0), os.dup(1)  # not inherited by programs that it starts
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def keep_files_private() -> None:
    """Makes new files of this process and its children readable by this user only."""
    os.umask(0o077)


def exists(pid: int) -> bool:
    """Whether a process with this id exists and this user may signal it."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def stopped(pids: Iterable[int]) -> str:
    """Text that names the stopped processes (e.g. by SIGSTOP); "" if none is stopped."""
    import psutil  # import late: the client installs without psutil

    found = []
    for pid in pids:
        with suppress(psutil.Error):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                found.append(pid)
    return f"stopped: process {', '.join(map(str, found))}" if found else ""


def child_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment of a child that dies with this process."""
    # The child does not inherit the news pipe: its number may be another file there.
    own = {PARENT_VARIABLE: str(os.getpid()), NEWS_VARIABLE: ""}
    return {**os.environ, **own, **(extra or {})}


def open_many_files() -> int:
    """Raises this process's limit of open files to the maximum and returns it. Each agent
    connection uses a file.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def last_lines(path: Path, count: int = 15, since: int = 0) -> str:
    """The end of a log file from byte `since`, without terminal control characters; "" if
    unreadable.
    """
    try:
        with path.open("rb") as log:
            log.seek(max(since, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            end = log.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(_NOT_SHOWN.sub("", end).rstrip().split("\n")[-count:])


def last_words(code: int, path: Path, since: int = 0, verdict: str = "") -> str:
    """One line: the exit of a process, its last error line from byte `since` of its log, and the
    log's path.

    `verdict`: reason of a kill.
    """
    lines = last_lines(path, since=since).split("\n")
    if code in _CRASHES:  # a stack trace may follow the error
        lines = [line for line in lines if _ERROR.search(line)]
    elif code < 0:  # an outside kill leaves no reason
        lines = []
    reason = f": {lines[-1].strip()}" if lines and lines[-1] else ""
    return f"{describe_exit(code)}{verdict}{reason}; log {path}"


def describe_exit(code: int) -> str:
    """An exit status as text."""
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    meaning = f"stopped by {_signal_name(code - 128)}" if code > 128 else _MEANINGS.get(code, "")
    return f"exited with status {code}{meaning and f' ({meaning})'}"


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def core_numbers() -> list[int]:
    """Numbers of the cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(core_numbers())


SUPERVISOR = "supervisor"
"""Owner name of the process that starts all services of a run: `paceline up`, `paceline demo`."""


@contextmanager
def owned(run_dir: Path, name: str) -> Iterator[None]:
    """Owns the directory under that name for the duration of the block. Raises as `own` does."""
    handle = own(run_dir, name)
    try:
        yield
    finally:
        os.ftruncate(handle, 0)  # keep the file: a lock on a removed file excludes no process
        os.close(handle)


def own(run_dir: Path, name: str, *, through_exec: bool = False) -> int:
    """Locks the directory under that name until the returned descriptor is closed.

    `through_exec`: keep the lock across exec. Raises FailedPrecondition with pid and start time of
    the current owner, ConfigError if the lock file cannot be written or locked.
    """
    path = run_dir / "pids" / f"{name}.pid"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", seen=run_dir) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        refusal = _refusal(run_dir, name, handle)
        os.close(handle)
        raise refusal from error
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"{path} cannot be locked: {error.strerror}", seen=run_dir) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, b"%d" % os.getpid(), 0)
    os.set_inheritable(handle, through_exec)
    return handle


def _refusal(run_dir: Path, name: str, handle: int) -> FailedPrecondition:
    """The error for a taken lock, with the owner's pid and start time from the file."""
    pid = os.pread(handle, 32, 0).decode() or "unknown"
    since = datetime.fromtimestamp(os.fstat(handle).st_mtime).astimezone()
    return FailedPrecondition(
        f"the {name} of {run_dir} runs already",
        reason="RUN_OWNED",
        seen=f"pid {pid}, since {since:%Y-%m-%d %H:%M:%S %z}",
        allowed="one at a time: stop that one, or name another run",
    )
