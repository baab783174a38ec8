"""Programs of other packages, each in a virtual environment of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def program(package: str, name: str, requirement: str) -> str:
    """Path of the program `name`: on PATH, or in ~/.cache/paceline/tools/<package>.

    Skips the test with the commands that install it where it is missing.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = home / "paceline" / "tools" / package
    found = shutil.which(name, path=f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"no {name}: python -m venv {place} && {place}/bin/pip install '{requirement}'")
    return found
