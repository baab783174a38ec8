"""A short `make recovery`: the only rank of a 135M-parameter policy dies on a busy CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.local.patience import patient

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


def test_a_killed_rank_trains_its_step_again_after_one_load_and_one_step_and_raises_no_alarm(
    tmp_path: Path, real_model: Path
) -> None:
    out = tmp_path / "recovery.json"
    command = [sys.executable, "-m", "benchmarks.chaos.recovery", "--out", str(out)]
    run = subprocess.run(
        [*command, "--busy", "4", "--model", str(real_model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert out.is_file(), run.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["status"], row["alarms"], row["errors"]) == (0, [], []), run.stdout
    assert row["recovery s"] <= row["load s"] + row["step s"] + patient(10), run.stdout
