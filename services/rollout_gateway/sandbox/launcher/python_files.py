"""Finds the host files that a bare Python needs.

The launcher runs under the code's interpreter, so its own memory map names the libraries.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

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
    found = {_real(path, links) for path in (*named, *_library_folders()) if os.path.exists(path)}
    return PythonFiles(tuple(executables), _outermost(found), links)


def _outermost(paths: set[str]) -> tuple[str, ...]:
    """The paths that are not beneath another one."""
    return tuple(
        sorted(
            path for path in paths if not any(str(above) in paths for above in Path(path).parents)
        )
    )


def _library_folders() -> set[str]:
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    return {os.path.dirname(path) for path in mapped if ".so" in os.path.basename(path)}


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
