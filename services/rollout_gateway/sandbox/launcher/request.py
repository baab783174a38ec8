"""The launcher's request and answer, as JSON, and the removal of a run's directory.

The gateway imports this module too.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

MEMORY_EXIT = 112
"""Exit code of the runner after an uncaught MemoryError."""
CODE_FILE = "main.py"


@dataclass(frozen=True)
class RunRequest:
    """One program to run. Sizes in bytes, times in seconds."""

    parent: int  # process id of the gateway
    box: str  # an empty directory for this run
    layers: Sequence[str]  # of "namespaces", "landlock", "seccomp"; each one is required
    code: str
    stdin: str
    files: Mapping[str, str]
    wall_s: float
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    output_bytes: int
    processes: int


@dataclass(frozen=True)
class SandboxResult:
    """Result of a run.

    `failed` is set when the sandbox itself failed; the other fields then have no meaning.
    """

    stdout: str = ""  # undecodable bytes replaced
    stderr: str = ""
    truncated: bool = False  # whether output was cut
    exit_code: int = 0  # minus the signal's number, if a signal ended it
    # "exit", "timeout", "cpu", "memory" (an uncaught MemoryError, or too much by all processes
    # together), or "killed": by a signal that no limit of ours sent.
    reason: str = "exit"
    wall_s: float = 0.0  # seconds, without building the layers
    failed: str = ""


def encode(value: RunRequest | SandboxResult) -> bytes:
    """JSON of an object with the class's arguments."""
    return json.dumps(asdict(value)).encode()


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
