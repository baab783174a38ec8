"""Describes the machine and the package versions, for a summary or a bench."""

import platform
from importlib.metadata import PackageNotFoundError, version

import psutil

from paceline.local.processes import usable_cores
from paceline.processor import processor_field

_PACKAGES = (
    *("paceline", "grpcio", "protobuf", "redis", "numpy"),
    *("uvloop", "torch", "transformers", "sglang"),
)


def machine_in_words() -> str:
    """Cores, processor, memory and system, in one line."""
    memory = psutil.virtual_memory().total / (1 << 30)
    cores = processor_field("model name") or platform.processor() or "an unnamed processor"
    return (
        f"{usable_cores()} cores of {cores}, {memory:.0f} GiB memory, {platform.system()} "
        f"{platform.machine()}"
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
