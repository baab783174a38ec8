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


def user_directory() -> Path:
    """`$XDG_RUNTIME_DIR/paceline`, else `<temporary directory>/paceline-<uid>`; made with mode
    0700 where it is absent.

    Raises ConfigError when another user owns it, others may enter it, or it is a link: then
    somebody waits for what we would write there.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = runtime and _is_private(Path(runtime))
    name = "paceline" if own else f"paceline-{os.getuid()}"
    directory = Path(runtime if own else tempfile.gettempdir()) / name
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not _is_private(directory):
        raise ConfigError(
            "the user's directory is not private",
            reason="NOT_PRIVATE",
            seen=directory,
            allowed="a directory of this user with mode 0700, no link",
        )
    return directory


def _is_private(directory: Path) -> bool:
    try:
        about = directory.lstat()
    except OSError:
        return False
    private = about.st_uid == os.getuid() and not about.st_mode & 0o077
    return private and stat.S_ISDIR(about.st_mode)
