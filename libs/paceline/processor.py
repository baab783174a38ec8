"""What the system says of the processor."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processor_field(name: str) -> str:
    """What /proc/cpuinfo says first under this name, such as `model name` or `vendor_id`; empty
    where there is no such file or line.
    """
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), "")
