"""Linux calls that Python lacks, by ctypes: mounts, capabilities, Landlock (files that a process
and its children may access) and the system-call filter, a BPF program over system_calls.csv.

The filter refuses calls known to reach outside and permits the rest, so that any Python runs.
Landlock governs files.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Mapping, Sequence
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
_TABLE = Path(__file__).with_name("system_calls.csv").read_text("ascii")
_COLUMNS, *_CALLS = [line.split(",") for line in _TABLE.split()]


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


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_DEVICE_OR_SOCKET = 1 << 6 | 1 << 9 | 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # the number of handled lowest bits
_NETWORK_ABI, _SCOPE_ABI = 4, 6
_BIND_AND_CONNECT = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3

READ = _READ_FILE | _READ_DIR
EXECUTE = _EXECUTE | _READ_FILE
READ_WRITE = _READ_FILE | _WRITE_FILE
EVERYTHING = (1 << 16) - 1 & ~_EXECUTE & ~_MAKE_DEVICE_OR_SOCKET
"""Rights of the code in its own directory: all except running programs and making devices and
sockets.
"""


def restrict_files(rules: Sequence[tuple[str, int]]) -> bool:
    """Denies this process every file except those beneath the paths, each with its rights.

    Returns whether it can now signal restricted processes only, which depends on the kernel.
    Raises OSError without Landlock.
    """
    version = syscall("landlock", _CREATE_RULESET, 0, 0, _LANDLOCK_VERSION)
    scoped = version >= _SCOPE_ABI
    handled = (1 << _RIGHTS_OF_ABI.get(version, 16)) - 1
    network = _BIND_AND_CONNECT if version >= _NETWORK_ABI else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if scoped else 0
    attributes = struct.pack("=QQQ", handled, network, scope)
    size = 8 if version < _NETWORK_ABI else 16 if version < _SCOPE_ABI else 24
    given = ctypes.c_char_p(attributes), size, 0
    ruleset = syscall("landlock_create_ruleset", _CREATE_RULESET, *given)
    for path, rights in rules:
        _allow(ruleset, path, rights & handled)
    syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return scoped


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        rights &= _ON_FILES
    rule = struct.pack("=Qi", rights, fd)
    syscall("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.c_char_p(rule), 0)
    os.close(fd)


_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MODE_FILTER = 2
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST = 0x15, 0x35
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_AF_UNIX = _SOCK_STREAM = 1
_SOCKET_TYPE = 0xF
_SHARED_ANONYMOUS, _HUGE_PAGES = 0x21, 0x40000
_FILE_COMMANDS = (8, 15, 1024, 1026, 1031)
"""F_SETOWN and F_SETOWN_EX (they let a pipe signal any process), F_SETLEASE, F_NOTIFY,
F_SETPIPE_SZ.
"""
_SOCKET_OWNERS = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP: the same by ioctl

Instruction = tuple[int, int, int, int]


def _refuse(number: int, error: int = errno.EPERM) -> list[Instruction]:
    return [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]


def _check(number: int, *conditions: list[Instruction]) -> list[Instruction]:
    """Permits the call when every condition on its arguments holds."""
    body = [*(one for condition in conditions for one in condition), (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _is(argument: int, value: int, mask: int = 0xFFFFFFFF) -> list[Instruction]:
    refusal = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    return [*_masked(argument, mask), (_JUMP_EQUAL, 1, 0, value), refusal]


def _is_none_of(argument: int, values: Sequence[int], mask: int = 0xFFFFFFFF) -> list[Instruction]:
    return _masked(argument, mask) + [one for value in values for one in _refuse(value)]


def _masked(argument: int, mask: int) -> list[Instruction]:
    """Loads the low word (of a little-endian long) of the argument with that index."""
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]


def _conditions(known: Mapping[str, int]) -> list[Instruction]:
    checks: Mapping[str, list[list[Instruction]]] = {
        "clone": [_is(0, 0, mask=ALL_NAMESPACES)],
        # a datagram socket of a pair can still send to any address
        "socketpair": [_is(0, _AF_UNIX), _is(1, _SOCK_STREAM, mask=_SOCKET_TYPE)],
        "prlimit64": [_is(0, 0)],
        # both leave uncounted memory when all but one page is unmapped
        "mmap": [
            _is_none_of(3, [_SHARED_ANONYMOUS], mask=_SHARED_ANONYMOUS),
            _is(3, 0, mask=_HUGE_PAGES),
        ],
        "fcntl": [_is_none_of(1, _FILE_COMMANDS)],
        "ioctl": [_is_none_of(1, _SOCKET_OWNERS)],
        # the file's size and huge pages stay unchanged
        "prctl": [_is_none_of(0, [PR_SET_DUMPABLE, PR_SET_THP_DISABLE])],
    }
    return [one for name, asked in checks.items() for one in _check(known[name], *asked)]


def filter_program(machine: str, *, alone: bool, scoped: bool, pid: int) -> list[Instruction]:
    """The filter. `alone`: in its own namespaces; `scoped`: Landlock confines its signals; `pid`:
    of the process that becomes the code.

    Raises OSError for an unknown architecture.
    """
    refused = [ALWAYS] if alone else [ALWAYS, SHARED] if scoped else [ALWAYS, SHARED, SIGNALS]
    known = numbers(machine, ARGUMENTS)
    filter_ = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, UNKNOWN),  # x32's numbers too
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in numbers(machine, *refused).values():
        filter_ += _refuse(number)
    # clone3's flags are in memory; libc then uses clone
    filter_ += _refuse(known["clone3"], errno.ENOSYS)
    filter_ += _conditions(known)
    if not alone and not scoped:
        filter_ += _check(known["tgkill"], _is(0, pid))

    return [*filter_, (_RETURN, 0, 0, _ALLOW)]


def install_filter(instructions: Sequence[Instruction]) -> None:
    """Filters this process and its children from now on; needs no_new_privs. Raises OSError."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(header))
