"""The file system of a sandbox: the host files that a bare Python needs, and their mounts.

The launcher runs under the code's interpreter, so its own memory map names the libraries.

A read-only root contains Python's files and a few devices, each a read-only bind mount, and one
writable directory of bounded size. No other host path is visible, and there is no /proc.
"""

import os
import stat
import struct
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from . import linux

DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")  # /dev/zero mapped is hidden memory
_LIBRARY_CACHE = "/etc/ld.so.cache"  # only the names of installed libraries
_PT_INTERP = 3


@dataclass(frozen=True)
class PythonFiles:
    """Real paths, and the symbolic links that lead to them."""

    executables: tuple[str, ...]  # the interpreter and the dynamic loader
    readable: tuple[str, ...]  # directories and files
    links: dict[str, str]  # link -> its target

    def private(self) -> bool:
        """Whether an unrelated user of this machine could not read them."""
        return not all(_public(path) for path in (*self.executables, *self.readable))


def enterable(path: str) -> bool:
    """Whether every user may pass through the directories above."""
    return all(os.stat(above).st_mode & stat.S_IXOTH for above in Path(path).parents)


def find() -> PythonFiles:
    """The files of this interpreter. Raises OSError when its own files cannot be read."""
    links: dict[str, str] = {}
    executables = [_real(sys.executable, links)]
    loader = _loader(executables[0])
    if loader:
        executables.append(_real(loader, links))
    named = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _LIBRARY_CACHE]
    if sys.base_prefix not in ("/usr", "/usr/local"):
        named.append(os.path.join(sys.base_prefix, "lib"))
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    named += {os.path.dirname(path) for path in mapped if ".so" in os.path.basename(path)}
    found = {_real(path, links) for path in named if os.path.exists(path)}
    outermost = {path for path in found if not found & {*map(str, Path(path).parents)}}
    return PythonFiles(tuple(executables), tuple(sorted(outermost)), links)


def _real(path: str, links: dict[str, str]) -> str:
    """The path without symbolic links; links on the way are recorded."""
    walked = "/"
    parts = [part for part in os.path.abspath(path).split("/") if part]
    while parts:
        step = os.path.join(walked, parts.pop(0))
        if os.path.islink(step):
            links[step] = os.readlink(step)
            target = os.path.normpath(os.path.join(walked, links[step]))
            parts = [part for part in target.split("/") if part] + parts
            walked = "/"
        else:
            walked = step
    return walked


def _loader(executable: str) -> str:
    """Path of the dynamic loader of an ELF file (64 bits); empty for a static file."""
    with open(executable, "rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            return ""
        table, size, count = struct.unpack_from("=Q14xHH", head, 32)
        for index in range(count):
            file.seek(table + index * size)
            kind, _, offset, _, _, length = struct.unpack("=IIQQQQ", file.read(40))
            if kind == _PT_INTERP:
                file.seek(offset)
                return file.read(length).rstrip(b"\0").decode()
    return ""


def _public(path: str) -> bool:
    there = os.stat(path)
    needed = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(there.st_mode) else stat.S_IROTH
    return enterable(path) and there.st_mode & needed == needed


BOX = "/box"
_MAX_FILES = 10_000
_FILES_OF_FULL_SIZE = 4  # number of files of the largest size that fit in the directory
_ROOM_BYTES = 1 << 20  # plus room for names and small files
_KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
"""Flags with the same bits in statvfs and in mount."""


def build(root: str, python: PythonFiles, file_bytes: int, input_bytes: int) -> None:
    """Makes `root`, any directory, the whole file system of this mount namespace. Raises OSError.

    `input_bytes` is the size of the files put into the writable directory before the code starts.
    """
    os.umask(0o022)  # the code's user must enter the folders; the gateway's umask may forbid it
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    os.chmod(root, 0o755)  # noqa: S103  (it is read-only below)
    for path in (*python.readable, *python.executables):
        if not any(path.startswith(f"{folder}/") for folder in python.readable):
            _bind(path, root + path)
    for device in DEVICES:
        _bind(device, root + device)
    for link, target in python.links.items():
        if not os.path.lexists(root + link):  # a path inside a mounted directory exists already
            os.makedirs(os.path.dirname(root + link), mode=0o755, exist_ok=True)
            os.symlink(target, root + link)
    box = root + BOX
    os.mkdir(box)
    size = _FILES_OF_FULL_SIZE * file_bytes + input_bytes + _ROOM_BYTES
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("tmpfs", box, "tmpfs", flags, f"size={size},nr_inodes={_MAX_FILES},mode=700")
    flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("none", root, "", linux.MS_REMOUNT | linux.MS_BIND | flags)
    # A further namespace would give the code capabilities, and enlarge the kernel's attack surface.
    Path("/proc/sys/user/max_user_namespaces").write_text("0", encoding="ascii")
    linux.pivot_root(root)


def _bind(path: str, target: str) -> None:
    is_folder = os.path.isdir(path)
    os.makedirs(target if is_folder else os.path.dirname(target), mode=0o755, exist_ok=True)
    if not is_folder:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(path, target, "", linux.MS_BIND | linux.MS_REC)
    # Mount flags of the host are locked in a user namespace: a remount must repeat them.
    there = os.statvfs(target).f_flag
    flags = there & _KEPT_FLAGS | (linux.MS_RELATIME if there & os.ST_RELATIME else 0)
    flags |= linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID
    linux.mount("none", target, "", flags)
