"""Directories that only one user or one process may enter.

A lock protects each directory while its process lives. The kernel releases the lock at any end of
the process.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from paceline.errors import ConfigError

_SHORT_PLACES = ("/tmp", "/dev/shm", "/run/user/{}")  # noqa: S108  # checked by _made


def user_directory() -> Path:
    """`<temporary directory>/paceline-<uid>`; created with mode 0700 if absent.

    $XDG_RUNTIME_DIR is unsuitable: it is removed after the user's last logout, and a run may
    continue.

    Raises ConfigError if it is a link, another user owns it, or other users may enter it. Such a
    directory may be a trap for files that Paceline would write.
    """
    return _made(Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}", 0o700)


def short_directory() -> Path:
    """A private directory with a short path, for sockets with their limited path length.

    It is `paceline-<uid>` in the first usable place of /tmp, /dev/shm and the user's runtime
    directory. It is created with mode 0700 if absent. $TMPDIR has no effect, so that all processes
    of this user find the same directory. Raises ConfigError if no place is usable.
    """
    refused = []
    for place in _SHORT_PLACES:
        try:
            return _made(Path(place.format(os.getuid())) / f"paceline-{os.getuid()}", 0o700)
        except (OSError, ConfigError) as error:
            refused.append(str(error))
    message = "no directory with a short path can hold sockets"
    allowed = f"a place of this user alone in one of {', '.join(_SHORT_PLACES)}"
    raise ConfigError(message, reason="NOT_PRIVATE", seen="; ".join(refused), allowed=allowed)


def enterable_directory() -> Path:
    """`<temporary directory>/paceline-boxes-<uid>`, mode 0711: other users may pass through, but
    not list it.

    It holds root's sandboxes. Their code runs under separate user ids. Raises as user_directory.
    """
    return _made(Path(tempfile.gettempdir()) / f"paceline-boxes-{os.getuid()}", 0o711)


def _made(directory: Path, mode: int) -> Path:
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        directory.chmod(mode)
    about = directory.lstat()
    ours = about.st_uid == os.getuid() and not about.st_mode & 0o777 & ~mode
    if not (ours and stat.S_ISDIR(about.st_mode)):
        message = "the user's directory is not private"
        allowed = f"a directory of this user with mode {mode:04o}, no link"
        raise ConfigError(message, reason="NOT_PRIVATE", seen=directory, allowed=allowed)
    return directory


Remove = Callable[[str], object]
SOCKET_BYTES = 100
"""Maximum bytes of a unix socket path; the system's own limit is 104 or 108."""
_SOCKET_NAME_BYTES = 40  # bytes for names below a process's directory
_ELSEWHERE = "elsewhere"  # links to files to remove with the directory


def process_directory() -> Path:
    """This process's own directory, removed with its content at the end of the process.

    Raises ConfigError if the user's directory is not private, OSError if no directory can be made.
    """
    return locked_directory(user_directory() / "live")


def socket_directory() -> Path:
    """The directory for this process's sockets.

    It is the process's own directory. If a socket path there exceeds the system's limit, a similar
    directory with a short path is used.

    Raises as process_directory, and ConfigError if no short path is private.
    """
    own = process_directory()
    if len(os.fsencode(own)) + _SOCKET_NAME_BYTES <= SOCKET_BYTES:
        return own
    return locked_directory(short_directory() / "live")


def sweep_with_us(path: Path) -> None:
    """Registers an external file, such as named shared memory of a library, for removal with this
    process's directory.
    """
    elsewhere = process_directory() / _ELSEWHERE
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / path.name).symlink_to(path)


@cache
def locked_directory(parent: Path, mode: int = 0o700, remove: Remove | None = None) -> Path:
    """A locked directory of this process in `parent`, the same at every call.

    Directories of ended processes are removed, with `remove` for special content.

    Raises OSError if no directory can be made.
    """
    with suppress(FileExistsError):
        parent.mkdir()
        parent.chmod(mode)
    for left in parent.iterdir():
        if (handle := _lock(left)) is not None:
            _remove(left, remove or shutil.rmtree)
            os.close(handle)
    while True:
        path = Path(tempfile.mkdtemp(prefix="", dir=parent))
        if _lock(path) is not None and path.is_dir():  # no process removed it before the lock
            path.chmod(mode)
            atexit.register(_remove, path, remove or shutil.rmtree)
            return path


def _remove(path: Path, remove: Remove) -> None:
    with suppress(OSError):  # the next cleanup tries again
        for link in (path / _ELSEWHERE).glob("*"):
            link.readlink().unlink(missing_ok=True)
        remove(str(path))


def _lock(path: Path) -> int | None:
    """A descriptor that locks the directory; None if it is locked or gone."""
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
