"""Gives a run directory one owner per name: a lock on `pids/<name>.pid`.

The kernel releases the lock at any end of the process, so a killed owner leaves no lock.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from paceline.errors import ConfigError, FailedPrecondition

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
