"""Reads the system's description of the processor."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


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
