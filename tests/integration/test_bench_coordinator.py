"""The coordinator bench runs with its real processes. Tests check only the figures that no other
load changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.local.patience import patient

pytestmark = pytest.mark.slow


def test_bench_measures_events_and_decisions_and_leaves_no_process(tmp_path: Path) -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    words = [
        "--slots",
        "512",
        "--events",
        "500",
        "--repeats",
        "1",
        "--decisions",
        "50",
        "--steps",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "coordinator", *words, "--json", tmp_path / "c.json"],
        capture_output=True,
        text=True,
        timeout=patient(90),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "c.json").read_text())
    rate, together, latency, *simulated = found["rows"]
    assert rate["events a step"] == 512 + 512 / 8 + 5
    assert rate["facts a step"] <= rate["events a step"]
    assert together["events a step"] == 512 + 2 + 5  # a lease ends with each 256 shares
    for one in (rate, together):
        assert one["missed facts"] == 0
        assert one["bytes beyond details"] <= 100
    assert latency["decisions"] >= 50
    assert {row["fleet"] for row in simulated} == {"8 GPUs", "2 cores"}
    assert all(set(goal) == {"name", "goal", "value", "met"} for goal in found["goals"])
    assert {one.pid for one in psutil.Process().children(recursive=True)} == before
