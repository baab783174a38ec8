"""Provides this user's private directory for sockets and temporary files outside of runs."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from paceline.errors import ConfigError

_SHORT_PLACES = ("/tmp", "/dev/shm", "/run/user/{}")  # noqa: S108  # checked by _is_ours


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
    raise ConfigError(
        "no directory with a short path can hold sockets",
        reason="NOT_PRIVATE",
        seen="; ".join(refused),
        allowed=f"a place of this user alone in one of {', '.join(_SHORT_PLACES)}",
    )


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
    if not _is_ours(directory, mode):
        raise ConfigError(
            "the user's directory is not private",
            reason="NOT_PRIVATE",
            seen=directory,
            allowed=f"a directory of this user with mode {mode:04o}, no link",
        )
    return directory


def _is_ours(directory: Path, mode: int) -> bool:
    try:
        about = directory.lstat()
    except OSError:
        return False
    ours = about.st_uid == os.getuid() and not about.st_mode & 0o777 & ~mode
    return ours and stat.S_ISDIR(about.st_mode)
