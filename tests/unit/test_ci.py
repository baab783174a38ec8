"""The scripts that decide whether a change may land."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("failing", "code", "closing"),
    [
        ("nothing", 0, "test: PASSED"),
        ("--ignore=tests/unit", 1, "test: FAILED in 0 s: [processes and contracts]"),
        ("worksteal", 1, "test: FAILED in 0 s: [unit]"),
        ("pytest", 1, "test: FAILED in 0 s: [processes and contracts] [unit]"),
    ],
)
def test_both_parts_run_and_the_last_line_names_those_that_failed(
    failing: str, code: int, closing: str, tmp_path: Path
) -> None:
    """Over a Python that writes down its arguments and fails where one of them fits."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/test", tmp_path / ".ci/test")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/usr/bin/env bash\necho "$@" >> calls\nfor one; do [ "$one" = {failing} ] && exit 1; done; exit 0\n'
    )
    python.chmod(0o755)
    done = subprocess.run([tmp_path / ".ci/test"], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.splitlines()[-1].startswith(closing)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert "--ignore=tests/unit" in first
    assert "tests/unit" in second.split()
