"""Landlock: the files that a process and its children may access, with rights by ABI version."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from .linux import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION = 1
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


def abi() -> int:
    """Version of Landlock in this kernel. Raises OSError without Landlock."""
    return syscall("landlock", _CREATE_RULESET, 0, 0, _VERSION)


def scopes_signals(version: int) -> bool:
    """Whether a restricted process can signal restricted processes only."""
    return version >= _SCOPE_ABI


def restrict(rules: Sequence[tuple[str, int]]) -> None:
    """Denies this process every file except those beneath the paths, each with its rights.

    Raises OSError.
    """
    version = abi()
    handled = (1 << _RIGHTS_OF_ABI.get(version, 16)) - 1
    network = _BIND_AND_CONNECT if version >= _NETWORK_ABI else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if scopes_signals(version) else 0
    attributes = struct.pack("=QQQ", handled, network, scope)
    size = 8 if version < _NETWORK_ABI else 16 if version < _SCOPE_ABI else 24
    ruleset = syscall(
        "landlock_create_ruleset", _CREATE_RULESET, ctypes.c_char_p(attributes), size, 0
    )
    for path, rights in rules:
        _allow(ruleset, path, rights & handled)
    syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        rights &= _ON_FILES
    rule = struct.pack("=Qi", rights, fd)
    syscall("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.c_char_p(rule), 0)
    os.close(fd)
