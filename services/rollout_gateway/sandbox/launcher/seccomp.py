"""The system-call filter as a BPF program; its lists are in system_calls.csv.

It refuses calls known to reach outside and permits the rest, so that any Python runs. Landlock
governs files.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Mapping, Sequence

from . import linux

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
    return [
        *_masked(argument, mask),
        (_JUMP_EQUAL, 1, 0, value),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]


def _is_none_of(argument: int, values: Sequence[int], mask: int = 0xFFFFFFFF) -> list[Instruction]:
    return _masked(argument, mask) + [one for value in values for one in _refuse(value)]


def _masked(argument: int, mask: int) -> list[Instruction]:
    """Loads the low word (of a little-endian long) of the argument with that index."""
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]


def _conditions(known: Mapping[str, int]) -> list[Instruction]:
    checks: Mapping[str, list[list[Instruction]]] = {
        "clone": [_is(0, 0, mask=linux.ALL_NAMESPACES)],
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
        # its size and its huge pages stay unchanged
        "prctl": [_is_none_of(0, [linux.PR_SET_DUMPABLE, linux.PR_SET_THP_DISABLE])],
    }
    return [one for name, asked in checks.items() for one in _check(known[name], *asked)]


def program(machine: str, *, alone: bool, signals_are_scoped: bool, pid: int) -> list[Instruction]:
    """The filter. `alone`: in its own namespaces; `pid`: of the process that becomes the code.

    Raises OSError for an unknown architecture.
    """
    refused = [linux.ALWAYS]
    if not alone:
        refused.append(linux.SHARED)
        if not signals_are_scoped:
            refused.append(linux.SIGNALS)

    known = linux.numbers(machine, linux.ARGUMENTS)
    filter_ = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, linux.UNKNOWN),  # x32's numbers too
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in linux.numbers(machine, *refused).values():
        filter_ += _refuse(number)
    # its flags are in memory; libc then uses clone
    filter_ += _refuse(known["clone3"], errno.ENOSYS)
    filter_ += _conditions(known)
    if not alone and not signals_are_scoped:
        filter_ += _check(known["tgkill"], _is(0, pid))

    return [*filter_, (_RETURN, 0, 0, _ALLOW)]


def install(instructions: Sequence[Instruction]) -> None:
    """Filters this process and its children from now on; needs no_new_privs. Raises OSError."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    linux.prctl(linux.PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(header))
