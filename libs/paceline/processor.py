"""The processor and the memory of this machine: descriptions and settings. Imports no torch."""

import ctypes
import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Limit of the container's memory in bytes, or "max"."""
FEWEST_BYTES = 1 << 20
"""Smallest matrix with a measured form (models/products.py); smaller ones are read from caches."""
PACKED_SHARE = 8
"""Weights are packed, and so held twice, if they are smaller than memory divided by this."""

KEPT_SHARE = 16
"""Memory of a dropped version is kept for the next one if it is at most the machine's memory
divided by this.
"""


def memory_bytes() -> int:
    """Memory of the machine, or the limit of the container if that is smaller."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit, or "max"
        return min(found, int(GROUP_LIMIT.read_text(encoding="ascii")))
    return found


def processor_field(name: str) -> str:
    """The first value of a field in /proc/cpuinfo, such as `model name` or `vendor_id`. Empty if
    the file or the field is absent.
    """
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), "")


HUGE_PAGE = 2 << 20
_ADVICE = (14, 25)
"""Linux's MADV_HUGEPAGE and MADV_COLLAPSE."""


def use_huge_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Puts spans of memory (address, bytes), and the rest of their outer pages, into pages of 2
    MiB.

    A processor reads large weights from such pages up to 1.5 times as fast. Nothing changes where
    the system has no such page: not Linux, before Linux 6.1, or without contiguous free memory.
    """
    pages: list[tuple[int, int]] = []
    for address, size in sorted(spans):
        first, end = address // HUGE_PAGE, -(-(address + size) // HUGE_PAGE)
        if pages and first <= pages[-1][1]:
            first, end = pages[-1][0], max(end, pages.pop()[1])
        pages.append((first, end))
    # Few calls: with each, the system waits for every processor.
    for first, end in pages if sys.platform == "linux" else ():
        place = ctypes.c_void_p(first * HUGE_PAGE), ctypes.c_size_t((end - first) * HUGE_PAGE)
        for advice in _ADVICE:
            ctypes.CDLL(None).madvise(*place, advice)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 1 << 20


def keep_freed_memory() -> bool:
    """Keeps freed buffers in the process, instead of returning each one to the kernel and faulting
    its pages in again.

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


def give_back_heap() -> None:
    """Returns freed memory of this process's heap to the system, where the C library can.
    `keep_freed_memory` keeps it between two such calls.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
