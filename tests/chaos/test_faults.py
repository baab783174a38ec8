"""A short `make chaos`: seeded faults in a whole run, judged from the data in Redis and on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.local.patience import patient

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]

FAULTS = 8


def test_a_run_under_faults_trains_each_sample_once_with_the_right_weights_and_tokens(
    tmp_path: Path,
) -> None:
    out = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "benchmarks.chaos", "--out", str(out)]
    run = subprocess.run(
        [*command, "--faults", str(FAULTS), "--seed", "15"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(500),
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines()[-1] == str(out)
    found = json.loads(out.read_text())
    assert found["faults"] == FAULTS
    wrong = ("lost", "duplicated", "wrong_weights", "disordered", "differing", "left_over")
    assert {name: found[name] for name in wrong} == {**dict.fromkeys(wrong, 0), "left_over": []}
    assert found["trained"] + sum(found["reported"].values()) == found["samples"] > 0
    assert found["versions_compared"] > 1
    assert found["samples_compared"] > 0
