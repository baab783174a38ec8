"""The file system of a sandbox in existing namespaces.

A read-only root contains Python's files and a few devices, each a read-only bind mount, and one
writable directory of bounded size. No other host path is visible, and there is no /proc.
"""

from __future__ import annotations

import os

from . import linux
from .python_files import DEVICES, PythonFiles

BOX = "/box"
_MAX_FILES = 10_000
_FILES_OF_FULL_SIZE = 4  # number of files of the largest size that fit in the directory
_ROOM_BYTES = 1 << 20  # plus room for names and small files
_KEPT_FLAGS = (  # of statvfs, and of mount
    (os.ST_NOSUID, linux.MS_NOSUID),
    (os.ST_NODEV, linux.MS_NODEV),
    (os.ST_NOEXEC, linux.MS_NOEXEC),
    (os.ST_NOATIME, linux.MS_NOATIME),
    (os.ST_NODIRATIME, linux.MS_NODIRATIME),
    (os.ST_RELATIME, linux.MS_RELATIME),
)


def build(root: str, python: PythonFiles, file_bytes: int, input_bytes: int) -> None:
    """Makes `root`, any directory, the whole file system of this mount namespace. Raises OSError.

    `input_bytes` is the size of the files put into the writable directory before the code starts.
    """
    os.umask(0o022)  # the code's user must enter the folders; the gateway's umask may forbid it
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    os.chmod(root, 0o755)  # noqa: S103  (it is read-only below)
    for path in (*python.readable, *python.executables):
        if not _below_mounted(path, python):
            _bind(path, root + path)
    for device in DEVICES:
        _bind(device, root + device)
    for link, target in python.links.items():
        _link(root + link, target)
    box = root + BOX
    os.mkdir(box)
    size = _FILES_OF_FULL_SIZE * file_bytes + input_bytes + _ROOM_BYTES
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("tmpfs", box, "tmpfs", flags, f"size={size},nr_inodes={_MAX_FILES},mode=700")
    linux.mount(
        "none",
        root,
        "",
        linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV,
    )
    _forbid_more_namespaces()
    linux.pivot_root(root)


def _below_mounted(path: str, python: PythonFiles) -> bool:
    return any(path.startswith(f"{folder}/") for folder in python.readable)


def _bind(path: str, target: str) -> None:
    is_folder = os.path.isdir(path)
    os.makedirs(target if is_folder else os.path.dirname(target), mode=0o755, exist_ok=True)
    if not is_folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(path, target, "", linux.MS_BIND | linux.MS_REC)
    # Mount flags of the host are locked in a user namespace: a remount must repeat them.
    there = os.statvfs(target).f_flag
    flags = linux.MS_NOSUID
    for found, flag in _KEPT_FLAGS:
        flags |= flag if there & found else 0
    linux.mount("none", target, "", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | flags)


def _link(path: str, target: str) -> None:
    if not os.path.lexists(path):  # a path inside a mounted directory exists already
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        os.symlink(target, path)


def _forbid_more_namespaces() -> None:
    """Forbids further namespaces: one made by the code would give it capabilities, and enlarge the
    kernel's attack surface.
    """
    with open("/proc/sys/user/max_user_namespaces", "w") as limit:
        limit.write("0")
