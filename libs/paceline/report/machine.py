"""The machine and the versions in words, for a summary or a bench.

Imports none of what it names.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("paceline", "torch", "transformers", "grpcio", "redis", "numpy")


def machine_in_words() -> str:
    """Cores, processor, memory, system: one line."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory = psutil.virtual_memory().total / (1 << 30)
    return (
        f"{cores} cores of {_processor()}, {memory:.0f} GiB memory, {platform.system()} "
        f"{platform.machine()}"
    )


def versions() -> dict[str, str]:
    """Version of Python and of the packages that matter; "" where one is not installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "an unnamed processor"
