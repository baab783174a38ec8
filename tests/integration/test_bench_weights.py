"""The bench of weights runs with its real processes; only `paceline bench` judges its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.local.patience import patient

pytestmark = pytest.mark.slow


def test_bench_pushes_versions_whole_and_as_deltas(tmp_path: Path) -> None:
    words = ["weights", "--millions", "0.2", "--repeats", "1", "--json", str(tmp_path / "w.json")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "w.json").read_text())
    assert [goal["goal"] for goal in facts["goals"]] == [
        0.6,
        -0.03,
        0.5,
        0.5,
        10.0,
        10.0,
        10.0,
        0.95,
        -1.5,
    ]
    moved = {row["what"]: row["MB"] for row in facts["rows"] if row["section"] == "transfers"}
    assert 0 < moved["delta"] < 0.05 * moved["full push"]
    assert moved["delta"] == moved["raw TCP, the delta's bytes"]
    (changed,) = (row for row in facts["rows"] if row["section"] == "changed")
    assert 0.1 < changed["changed %"] < 5
