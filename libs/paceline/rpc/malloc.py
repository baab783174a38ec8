"""glibc's allocator thresholds for messages of about one MiB."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_MIB = 1 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def set_malloc_thresholds() -> bool:
    """Keeps freed message buffers in the process, instead of returning each one to the kernel and
    faulting it in again.

    Both thresholds are needed: setting one freezes the other at its small default. The price is up
    to about 128 MiB of free heap per arena. Call this at process start. Returns False without a
    change on other systems than Linux with glibc, and if the environment sets a MALLOC_* variable
    or a malloc tunable. Also returns False when glibc refuses a value.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False

    libc = ctypes.CDLL(None)
    wanted = (
        (_M_MMAP_THRESHOLD, 64 * _MIB),
        (_M_TRIM_THRESHOLD, 128 * _MIB),
        (_M_TOP_PAD, 16 * _MIB),
    )
    accepted = [libc.mallopt(parameter, value) == 1 for parameter, value in wanted]
    return all(accepted)
