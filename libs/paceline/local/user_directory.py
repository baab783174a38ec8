"""The directory of the user that runs Paceline: sockets, temporary files, what belongs to no run.

Owns where it is and that nobody else may read or write it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from paceline.errors import ConfigError

_SHORT_PLACES = ("/tmp", "/dev/shm", "/run/user/{}")  # noqa: S108  # checked by _is_ours


def user_directory() -> Path:
    """`<temporary directory>/paceline-<uid>`; made with mode 0700 where it is absent.

    Not in $XDG_RUNTIME_DIR: that goes with the user's last login, and a run may stay.

    Raises ConfigError when another user owns it, others may enter it, or it is a link: then
    somebody waits for what we would write there.
    """
    return _made(Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}", 0o700)


def short_directory() -> Path:
    """A directory of this user alone with a short path, for sockets, whose paths are bounded.

    It is `paceline-<uid>` in /tmp, /dev/shm or the user's runtime directory, the first of these
    where this user can have one; made with mode 0700 where it is absent. $TMPDIR does not change
    it, so that all processes of this user find the same one. Raises ConfigError where there is
    none.
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
    """`<temporary directory>/paceline-boxes-<uid>`, mode 0711: others may pass through it, but not
    list it. For root's sandboxes, whose code has user ids of its own. Raises as user_directory.
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
