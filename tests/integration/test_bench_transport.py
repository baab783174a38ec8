"""The transport bench runs with its real processes; only `paceline bench` judges its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.local.patience import patient

pytestmark = pytest.mark.slow


def test_bench_measures_both_transports_and_leaves_no_process(tmp_path: Path) -> None:
    before = {
        one.pid for one in psutil.Process().children(recursive=True)
    }  # servers that other tests share
    words = [
        "transport",
        "--mib",
        "4",
        "--pairs",
        "2",
        "--looks",
        "1",
        "--json",
        str(tmp_path / "t.json"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "weight push" in done.stdout
    facts = json.loads((tmp_path / "t.json").read_text())
    assert [goal["goal"] for goal in facts["goals"]] == [0.15, 0.6]
    assert all(row["wall s"] > 0 and row["far peak MiB"] > 0 for row in facts["rows"])
    after = [
        one
        for one in psutil.Process().children(recursive=True)
        if one.status() != psutil.STATUS_ZOMBIE
    ]
    assert [one for one in after if one.pid not in before] == []
