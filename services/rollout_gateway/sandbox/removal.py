"""The end of a directory that untrusted code has filled. Owns nothing else."""

from __future__ import annotations

import itertools
import os
import stat

from paceline.telemetry import get_logger

log = get_logger(__name__)


def remove_tree(path: str) -> None:
    """Remove a directory that no process uses any more; what cannot be removed is logged.

    Follows no link. Directories are moved up before they are emptied, so that no depth is too deep and no path too
    long, and are made accessible first.
    """
    try:
        _flatten(path)
        os.rmdir(path)
    except OSError as error:
        log.warning("a sandbox's directory could not be removed", path=path, error=str(error))


def _flatten(path: str) -> None:
    numbers = itertools.count()
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        os.chmod(folder, stat.S_IRWXU)
        with os.scandir(folder) as entries:
            found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            if is_folder:
                os.chmod(name, stat.S_IRWXU)
                moved = f"{path}/.emptied-{next(numbers)}-{os.urandom(4).hex()}"
                os.rename(name, moved)
                waiting.append(moved)
            else:
                os.unlink(name)
        if folder != path:
            os.rmdir(folder)
