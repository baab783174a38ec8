"""Removes a directory that untrusted code has filled."""

from __future__ import annotations

import itertools
import os
import stat

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str) -> None:
    """Removes a directory of the code with all its content. Raises OSError.

    All names are relative to the descriptor of their directory, so no link leads outside, even one
    made meanwhile. Directories are moved up before they are emptied, so no depth or path length is
    too large.
    """
    numbers = itertools.count()
    top = _opened(path, None)
    try:
        waiting = _empty(top, top, numbers)
        while waiting:
            name = waiting.pop()
            folder = _opened(name, top)
            try:
                waiting += _empty(folder, top, numbers)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)

    os.rmdir(path)


def _opened(name: str, parent: int | None) -> int:
    """Opens a directory for reading and changes, for any mode."""
    handle = os.open(name, _FOLDER | os.O_PATH, dir_fd=parent)
    os.chmod(f"/proc/self/fd/{handle}", stat.S_IRWXU)
    os.close(handle)
    return os.open(name, _FOLDER | os.O_RDONLY, dir_fd=parent)


def _empty(folder: int, top: int, numbers: itertools.count[int]) -> list[str]:
    """Removes files, moves directories to the top, and returns the directories' new names."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    moved = []
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
            continue
        os.close(_opened(name, folder))  # an unwritable directory cannot be moved
        moved.append(f".emptied-{next(numbers)}-{os.urandom(4).hex()}")
        os.rename(name, moved[-1], src_dir_fd=folder, dst_dir_fd=top)
    return moved
