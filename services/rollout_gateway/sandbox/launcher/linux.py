"""Linux calls that Python lacks, by ctypes, with constants and errors."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from . import syscalls

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_SET_THP_DISABLE = 41
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWNS
    | CLONE_NEWCGROUP
    | CLONE_NEWUTS
    | CLONE_NEWIPC
    | CLONE_NEWUSER
    | CLONE_NEWPID
    | CLONE_NEWNET
)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
MNT_DETACH = 2

CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63

MACHINE = platform.machine()

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
    number = syscalls.numbers(MACHINE, syscalls.ALWAYS)["pivot_root"]
    os.chdir(root)
    syscall("pivot_root", number, ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _checked("umount2", _libc.umount2(b".", MNT_DETACH))
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
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except (
                OSError
            ):  # none on this kernel, or not permitted: then no_new_privs alone applies
                continue
