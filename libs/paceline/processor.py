"""Reads the system's description of the processor and its memory. Imports no torch."""

import os
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Limit of the container's memory in bytes, or "max"."""
FEWEST_BYTES = 1 << 20
"""Smallest matrix with a measured form (models/products.py); smaller ones are read from caches."""
PACKED_SHARE = 8
"""Weights are packed, and so held twice, if they are smaller than memory divided by this."""


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
