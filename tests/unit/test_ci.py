"""The scripts that decide whether a change may land."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.config import CoordinatorConfig
from paceline.config import known_keys

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("failing", "code", "closing"),
    [
        ("nothing", 0, "test: PASSED"),
        ("--ignore=tests/unit", 1, "test: FAILED in N s: [processes and contracts]"),
        ("worksteal", 1, "test: FAILED in N s: [unit]"),
        ("pytest", 1, "test: FAILED in N s: [processes and contracts] [unit]"),
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
    last = re.sub(r"in \d+ s", "in N s", done.stdout.splitlines()[-1])
    assert last.startswith(closing)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert "--ignore=tests/unit" in first
    assert "tests/unit" in second.split()


def test_the_page_of_settings_has_every_key_once_with_its_range(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / ".ci/docs", tmp_path], check=True, capture_output=True)
    section, rows = "", {}
    for line in (tmp_path / "settings.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            key, *cells = (cell.strip().strip("`") for cell in line.strip("|").split(" | "))
            assert rows.setdefault(f"{section}.{key}", cells) is cells
    shared = ("run.", "redis.", "telemetry.", "security.", "addresses.")
    known = known_keys(CoordinatorConfig)
    own = {f"coordinator.{key}" for key in known if not key.startswith(shared)}
    assert {key for key in rows if key.startswith("coordinator.")} == own
    assert {key for key in rows if key.startswith(shared)} == set(known) & {
        key for key in known if key.startswith(shared)
    }
    assert rows["coordinator.sampling.temperature"][:3] == ["float", "1.0", "> 0, <= 10"]
    assert rows["run.seed"][:3] == ["integer", "0", ">= 0, < 2^63"]
