"""The system-call filter: what the code may not ask the kernel. Owns the BPF program; the lists are
in syscalls.py.

It refuses what is known to reach outside and lets the rest pass, so that any Python runs; files are
Landlock's matter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from . import syscalls
from .linux import ALL_NAMESPACES, MACHINE, PR_SET_SECCOMP, prctl

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MODE_FILTER = 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# offsets in struct seccomp_data; low word of a little-endian long
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = (
    0,
    4,
    16,
)
_X32 = 0x40000000
_AF_UNIX = 1

Instruction = tuple[int, int, int, int]


def _return_error(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _refuse(number: int, error: int = errno.EPERM) -> list[Instruction]:
    return [(_JUMP_EQUAL, 0, 1, number), _return_error(error)]


def _refuse_unless(number: int, first_argument: int) -> list[Instruction]:
    """The call passes only with that first argument."""
    return [
        (_JUMP_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_EQUAL, 1, 0, first_argument),
        _return_error(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _refuse_bits(number: int, bits: int) -> list[Instruction]:
    """The call passes only without any of these bits in its first argument."""
    return [
        (_JUMP_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_BITS, 0, 1, bits),
        _return_error(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def program(machine: str, *, alone: bool, signals_are_scoped: bool, pid: int) -> list[Instruction]:
    """The filter. `alone`: in namespaces of its own; `pid`: of the process that becomes the code.

    Raises OSError for an architecture that is not known.
    """
    refused = dict(syscalls.ALWAYS)
    if not alone:
        refused |= syscalls.SHARED_SYSTEM
        if not signals_are_scoped:
            refused |= syscalls.SIGNALS

    known = syscalls.numbers(machine, syscalls.WITH_CONDITIONS)
    filter_ = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    filter_ += [(_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        filter_ += [(_JUMP_AT_LEAST, 0, 1, _X32), _return_error(errno.ENOSYS)]
    for number in syscalls.numbers(machine, refused).values():
        filter_ += _refuse(number)
    # its flags lie in memory; libc then falls back to clone
    filter_ += _refuse(known["clone3"], errno.ENOSYS)
    filter_ += _refuse_bits(known["clone"], ALL_NAMESPACES)
    filter_ += _refuse_unless(known["socketpair"], _AF_UNIX)
    if not alone:
        filter_ += _refuse_unless(known["prlimit64"], 0)
        if not signals_are_scoped:
            filter_ += _refuse_unless(known["tgkill"], pid)

    return [*filter_, (_RETURN, 0, 0, _ALLOW)]


def install(*, alone: bool, signals_are_scoped: bool) -> None:
    """Filter this process and its children from now on; needs no_new_privs. Raises OSError."""
    instructions = program(
        MACHINE, alone=alone, signals_are_scoped=signals_are_scoped, pid=os.getpid()
    )
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(header))
