"""Writes files atomically or durably, and writes and checks the hashes of a directory's files.

A flipped byte in the manifest is detected too: a hash no longer matches, or the JSON is invalid.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import DataLoss, ResourceExhausted

MANIFEST = "manifest.json"


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hashes(directory: Path, known: Mapping[str, str] | None = None) -> None:
    """Writes the manifest of all files below the directory.

    `known`: existing hashes by path relative to the directory, computed while the files were
    written.
    """
    hashes = dict(known or {})
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != MANIFEST and name not in hashes:
            hashes[name] = file_hash(path)
    text = json.dumps({"sha256": hashes}, indent=1, sort_keys=True) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def read_hashes(directory: Path) -> dict[str, str]:
    """The hash of each file. Raises DataLoss if the manifest cannot be read."""
    path = directory / MANIFEST
    try:
        hashes = json.loads(path.read_text(encoding="utf-8"))["sha256"]
        if not hashes or not all(isinstance(one, str) for one in hashes.values()):
            raise ValueError("no hash of a file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{path} is no list of hashes", seen=str(error)[:120]) from error
    return dict(hashes)


def check_hashes(directory: Path, part: int = 0, parts: int = 1, *, only: str = "") -> None:
    """Checks the files in the manifest against their hashes.

    Checks share `part` of `parts` shares, or the file `only`. Raises DataLoss with the name of the
    first file that differs or cannot be read.
    """
    hashes = read_hashes(directory)
    checked = {only: hashes.get(only, "")} if only else hashes
    for name, written in sorted(checked.items())[part::parts]:
        try:
            seen = file_hash(directory / name)
        except (OSError, ValueError) as error:
            raise DataLoss(f"{directory / name} cannot be read", seen=str(error)[:120]) from error
        if seen != written:
            raise DataLoss(f"{directory / name} is damaged", seen=seen, allowed=written)


TEMPORARY = ".tmp-"
"""Name prefix of synced files and directories that are still incomplete."""

DISK_FULL = "DISK_FULL"
"""Reason of the error for a write without free space."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space on the disk, in the user's quota, or below a file size limit."""
PART_BYTES = 64 << 20
"""Bytes of a large file per sync to the disk."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Converts a failed write in the block to ResourceExhausted.

    The reason is DISK_FULL if space is lacking; the same write succeeds after space is freed.
    """
    try:
        yield
    except OSError as error:
        reason = DISK_FULL if error.errno in NO_ROOM else None
        raise ResourceExhausted(f"{path} cannot be written", reason=reason, seen=error) from error


def write_whole(path: Path, text: str) -> None:
    """Atomically writes a file that only its owner can read, and makes its directory.

    A kill leaves either the old or the new content. The file is not synced, so a power loss may
    leave neither. Raises ResourceExhausted as `writing` does.
    """
    temporary = path.with_suffix(".tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def sync_file(path: Path, synced: Callable[[], None] = lambda: None) -> None:
    """Syncs a file to the disk; calls `synced` after each PART_BYTES.

    So the time between two calls depends on the disk's speed and not on the file's size.
    """
    with path.open("r+b") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > PART_BYTES:
            with mmap.mmap(file.fileno(), nbytes) as mapped:
                for start in range(0, nbytes, PART_BYTES):
                    mapped.flush(start, min(PART_BYTES, nbytes - start))
                    synced()
        os.fsync(file.fileno())


def is_open(path: Path) -> bool:
    """Whether a process has the file open or mapped. True where the system cannot grant a lease,
    which the kernel refuses for an open file.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return True
    with path.open("r+b") as file:
        try:
            # Ignored by default: an open during the lease would otherwise end this process.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return True
    return False


def replace_synced(path: Path, content: bytes) -> None:
    """Atomically replaces a file and syncs it with its name before it returns.

    A kill or a power loss leaves either the old or the new content. Raises ResourceExhausted as
    `writing` does.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with writing(path):
        temporary.write_bytes(content)
        sync_file(temporary)
        temporary.replace(path)
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Syncs a file, or a directory's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
