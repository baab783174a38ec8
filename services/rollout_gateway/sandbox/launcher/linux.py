"""Linux calls that Python lacks, by ctypes, and the numbers of refused system calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from pathlib import Path

ALWAYS, SHARED, SIGNALS, ARGUMENTS = "always", "shared", "signals", "arguments"
"""Groups of system calls, the last column of system_calls.csv.

ALWAYS: refused everywhere: sockets, memory of other processes, memory and files outside of any
process's size, mounts, namespaces, kernel modules, clock, lasting IPC, and calls that wake or stall
the whole host. SHARED: refused without namespaces only. Landlock does not govern changes of modes,
owners and times, nor actions on processes of the same user. Without a new session, one signal
reaches all of the code. SIGNALS: refused if neither a pid namespace nor Landlock confines signals
to the code's own processes. ARGUMENTS: refused with some arguments.
"""
UNKNOWN = 470
"""Numbers from here on are newer than the table: refused as by a kernel without them."""
# Read before the first fork: the confined process cannot open the file.
_COLUMNS, *_CALLS = [
    line.split(",")
    for line in Path(__file__).with_name("system_calls.csv").read_text("ascii").split()
]


def numbers(machine: str, *groups: str) -> dict[str, int]:
    """Numbers by name, for the calls of these groups that the architecture has.

    Raises OSError for an unknown architecture.
    """
    architectures = _COLUMNS[1:-1]
    if machine not in architectures:
        raise OSError(f"system calls of {machine} are not known; known: {', '.join(architectures)}")
    column = _COLUMNS.index(machine)
    return {row[0]: int(row[column]) for row in _CALLS if row[-1] in groups and row[column]}


PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP = 1, 4, 8, 22
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 24, 36, 38, 41
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 4

ALL_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8  # as ST_* of statvfs
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 32, 4096, 16384, 1 << 18, 1 << 21
_MNT_DETACH = 2

CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    """A system call by its number; plain numbers are passed as longs.

    Raises OSError with the name in its text.
    """
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *passed))


def prctl(option: int, *arguments: object) -> None:
    """prctl(2). Raises OSError."""
    passed = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    rest = [ctypes.c_ulong(0)] * (4 - len(passed))
    _checked(f"prctl {option}", _libc.prctl(ctypes.c_int(option), *passed, *rest))


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2). Raises OSError that names the target."""
    encoded = (source.encode(), target.encode(), kind.encode() or None)
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    _checked(f"mount {kind or source} at {target}", result)


def pivot_root(root: str) -> None:
    """Makes `root`, a mount point, the whole file system; the former one is gone.

    Raises OSError.
    """
    number = numbers(os.uname().machine, ALWAYS)["pivot_root"]
    os.chdir(root)
    syscall("pivot_root", number, ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _checked("umount2", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def set_capabilities(kept: int) -> None:
    """Sets permitted, effective and inheritable capabilities to the bits `kept`.

    Raises OSError.
    """
    words = struct.pack("=6I", *[kept & 0xFFFFFFFF] * 3, *[kept >> 32] * 3)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _checked("capset", _libc.capset(header, words))


def shrink_bounding_set(kept: int) -> None:
    """Limits capabilities gained by exec to `kept`; without CAP_SETPCAP there is nothing
    to gain.
    """
    for capability in range(_LAST_CAPABILITY + 1):
        if not kept >> capability & 1:
            with contextlib.suppress(OSError):  # none, or not permitted: no_new_privs applies
                prctl(PR_CAPBSET_DROP, capability)
