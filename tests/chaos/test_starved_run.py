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
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines()[-1] == str(out)
    found = json.loads(out.read_text())
    (seed,) = found["seeds"]
    assert not any(seed["wrong"].values()), seed["wrong"]
    assert seed["parts"]["trained"] == 2 * 8 * 16
    assert len(seed["stops"]) >= 10  # each service, rank, engine worker and Redis
    # Two steps may be too short for a promotion, which takes the time that rollouts leave idle.
    judged = [one for one in found["goals"] if not one["name"].startswith("promotions")]
    assert len(judged) == len(found["goals"]) - 1
    assert all(goal["met"] for goal in judged)
