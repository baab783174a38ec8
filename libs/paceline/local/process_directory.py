"""Gives each process a directory for its sockets and temporary files, and sweeps those of the dead.

Each is locked while its process lives; the kernel lets go of the lock however the process ends.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from paceline.local.user_directory import short_directory, user_directory

Remove = Callable[[str], object]
SOCKET_BYTES = 100
"""Of the path of a unix socket, at most; the system's own bound is 104 or 108."""
_SOCKET_NAME_BYTES = 40  # of folders and names below a process's directory
_ELSEWHERE = "elsewhere"  # links to files that go with the directory


def process_directory() -> Path:
    """This process's own directory, removed with all that is in it when the process ends.

    Raises ConfigError where the user's directory is not private, OSError where none can be made.
    """
    return locked_directory(user_directory() / "live")


def socket_directory() -> Path:
    """The directory of this process's sockets: its own directory, or another one like it with a
    short path where that would make the path of a socket longer than the system takes.

    Raises as process_directory, and ConfigError where no short path is private.
    """
    own = process_directory()
    if len(os.fsencode(own)) + _SOCKET_NAME_BYTES <= SOCKET_BYTES:
        return own
    return locked_directory(short_directory() / "live")


def sweep_with_us(path: Path) -> None:
    """Has a file that lies elsewhere, such as shared memory that a library has named, removed with
    this process's directory.
    """
    elsewhere = process_directory() / _ELSEWHERE
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / path.name).symlink_to(path)


@cache
def locked_directory(parent: Path, mode: int = 0o700, remove: Remove | None = None) -> Path:
    """A directory of this process's own in `parent`, the same one at every call; those there whose
    process has ended are taken away, with `remove` where a directory's content is not ours.

    Raises OSError where none can be made.
    """
    with suppress(FileExistsError):
        parent.mkdir()
        parent.chmod(mode)
    for left in parent.iterdir():
        _sweep(left, remove or shutil.rmtree)
    while True:
        path = Path(tempfile.mkdtemp(prefix="", dir=parent))
        if _lock(path) is not None and path.is_dir():  # nobody swept it before it was locked
            path.chmod(mode)
            atexit.register(_remove, path, remove or shutil.rmtree)
            return path


def _sweep(path: Path, remove: Remove) -> None:
    handle = _lock(path)
    if handle is not None:
        _remove(path, remove)
        os.close(handle)


def _remove(path: Path, remove: Remove) -> None:
    with suppress(OSError):  # the next sweep tries again
        for link in (path / _ELSEWHERE).glob("*"):
            link.readlink().unlink(missing_ok=True)
        remove(str(path))


def _lock(path: Path) -> int | None:
    """A descriptor that holds the directory; None when a process holds it or it is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
