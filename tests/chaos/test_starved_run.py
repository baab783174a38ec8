"""A short `make starve`: a run with processes stopped at random, at the lowest priority."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.local.patience import patient

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_starved_run_loses_no_process_and_trains_the_tokens_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    out = tmp_path / "starve.json"
    command = [sys.executable, "-m", "benchmarks.chaos.starve", "--out", str(out)]
    run = subprocess.run(
        [*command, "--seeds", "1", "--steps", "2", "--busy", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(500),
        check=False,
    )
    assert run.stdout.splitlines()[-1] == str(out), run.stdout
    found = json.loads(out.read_text())
    (seed,) = found["seeds"]
    assert not any(seed["wrong"].values()), seed["wrong"]
    assert seed["parts"]["trained"] == 2 * 8 * 16
    assert len(seed["stops"]) >= 10  # each service, rank, engine worker and Redis
    # Two steps may be too short for a promotion, which takes the time that rollouts leave idle.
    missed = {goal["name"] for goal in found["goals"] if not goal["met"]}
    assert missed <= {"promotions in each seed, at least"}, run.stdout
    assert run.returncode == bool(missed)
