"""Describes the machine and the package versions, for a summary or a bench."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

import psutil

from paceline.config import ServiceConfig
from paceline.local.processes import usable_cores
from paceline.processor import processor_field

_PACKAGES = (
    "paceline",
    "grpcio",
    "protobuf",
    "redis",
    "numpy",
    "uvloop",
    "torch",
    "transformers",
    "sglang",
)
_ON_ALL_HOSTS = ("python", "paceline", "torch", "transformers")


def machine_in_words() -> str:
    """Cores, processor, memory and system, in one line."""
    memory = psutil.virtual_memory().total / (1 << 30)
    return (
        f"{usable_cores()} cores of {_processor()}, {memory:.0f} GiB memory, {platform.system()} "
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


def same_on_hosts(config: ServiceConfig, of_a_host: Collection[str]) -> dict[str, str]:
    """What all hosts of a service have to have alike, by name: versions, and hashes of settings.
    `of_a_host`: sections that each may have for itself.
    """
    found = {name: value for name, value in versions().items() if name in _ON_ALL_HOSTS}
    for name, value in config.model_dump(mode="json", exclude=set(of_a_host)).items():
        text = json.dumps(value, sort_keys=True).encode()
        found[f"{name} in the settings"] = hashlib.sha256(text).hexdigest()[:16]
    return found


def _processor() -> str:
    return processor_field("model name") or platform.processor() or "an unnamed processor"
