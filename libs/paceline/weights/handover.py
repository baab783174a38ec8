"""Hands weights over as a file if sender and receiver are on one host.

During the handover the sender's file has a name in the directory from which the receiver takes
files. Its pages are shared: the receiver reads them from the system's cache. It does not map them,
because a file truncated meanwhile would kill the reading process.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from paceline.errors import ConfigError, DataLoss, InvalidInput
from paceline.v1.weights_pb2 import Handover
from paceline.whole_files import writing

HANDOVER = "HANDOVER"
"""Error reason of a file that a receiver refuses; the sender then uses the network."""
_ANCHOR = ".scratch-"
_NAME = re.compile(r"[0-9a-f]{32}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ScratchFile:
    """A mapped file in the directory. The system writes out pages that find no room in memory. The
    file disappears when it is dropped. It has no name before its first handover.
    """

    def __init__(self, nbytes: int, directory: Path) -> None:
        """Raises ResourceExhausted on creation, not on a later write."""
        self._directory = directory
        self._anchor: Path | None = None
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._handle = _open_unnamed(directory)
            weakref.finalize(self, os.close, self._handle)
            os.posix_fallocate(self._handle, 0, nbytes)
            self.memory = memoryview(mmap.mmap(self._handle, nbytes))

    @contextmanager
    def named(self, directory: str) -> Iterator[str]:
        """Within the block, the file has a name in a directory of the same file system. Raises
        OSError if that is impossible.
        """
        name, anchor = secrets.token_hex(16), self._anchored()
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.link(anchor, name, dst_dir_fd=folder, follow_symlinks=False)
            try:
                yield name
            finally:
                with suppress(FileNotFoundError):  # a starting receiver removes all files
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def _anchored(self) -> Path:
        """A permanent name beside the file: a file that has lost its last name cannot get
        another.
        """
        if self._anchor is None:
            anchor = self._directory.absolute() / f"{_ANCHOR}{secrets.token_hex(16)}"
            folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Given a folder, Python follows the link to the unnamed file.
                handle = f"/proc/self/fd/{self._handle}"
                os.link(handle, anchor.name, dst_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
            weakref.finalize(self, anchor.unlink, missing_ok=True)
            self._anchor = anchor
        return self._anchor


def remove_scratch(directory: Path) -> None:
    """Removes files that killed processes left in a directory. No file there may be in use."""
    for left in directory.glob(f"{_ANCHOR}*"):
        left.unlink(missing_ok=True)


class HandoverDirectory:
    """The directory from which a receiver takes files, private to its owner."""

    def __init__(self, path: Path) -> None:
        """Creates it. Raises ConfigError unless it is a directory that only this user can
        write to.
        """
        self._path = Path(os.path.abspath(path))
        with writing(self._path):
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._path.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_own(found) or found.st_mode & 0o022:
            raise ConfigError(
                f"{self._path} is not a directory for handing weights over",
                seen=f"mode {found.st_mode:o} of user {found.st_uid}",
                allowed=f"a directory that user {os.geteuid()} alone can write to",
            )
        for left in self._path.iterdir():  # left by killed senders
            if _NAME.fullmatch(left.name):
                left.unlink(missing_ok=True)
        self.described = _described(self._path)

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Opens a file of the directory for reading. Raises InvalidInput with reason HANDOVER for a
        refused name, kind or owner.
        """
        if not _NAME.fullmatch(name):
            raise _refused("name of a file that is handed over", name[:80], _NAME.pattern)
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        folder = handle = -1
        try:
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | flags)
            # non-blocking: a pipe of that name would wait for its writer
            handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=folder)
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or not _is_own(found):
                seen = f"mode {found.st_mode:o} of user {found.st_uid}"
                raise _refused(name, seen, f"a file of user {os.geteuid()}")
            yield handle
        except OSError as error:
            raise _refused(name, error, "a file, and no link") from error
        finally:
            for one in (handle, folder):
                if one >= 0:
                    os.close(one)


def is_here(handover: Handover) -> bool:
    """Whether the receiver's directory is also visible to this process."""
    try:
        return bool(handover.directory) and handover == _described(Path(handover.directory))
    except OSError:
        return False


def check_inside(handle: int, end: int) -> None:
    """Raises InvalidInput with reason HANDOVER when the file ends before byte `end`."""
    size = os.fstat(handle).st_size
    if end > size:
        raise _refused("range of a file that is handed over", f"to byte {end}", f"to byte {size}")


def read_range(handle: int, position: int, nbytes: int) -> memoryview:
    """Bytes of a file. Raises DataLoss if the file ends before them."""
    data = np.empty(nbytes, dtype=np.uint8).data  # not zeroed first
    done = 0
    while done < nbytes and (read := os.preadv(handle, [data[done:]], position + done)):
        done += read
    if done != nbytes:
        raise DataLoss("a file that is handed over has become shorter", seen=done, allowed=nbytes)
    return data


def _open_unnamed(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # the file system has no unnamed files that can be named
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.dup(file.fileno())


def _described(path: Path) -> Handover:
    found = path.lstat()
    boot_id = _BOOT_ID.read_text().strip()
    return Handover(directory=str(path), device=found.st_dev, inode=found.st_ino, boot_id=boot_id)


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid()


def _refused(what: str, seen: object, allowed: object) -> InvalidInput:
    return InvalidInput(f"{what} is not taken", reason=HANDOVER, seen=seen, allowed=allowed)
