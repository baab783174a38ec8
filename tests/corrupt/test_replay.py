"""A restarted policy trainer recomputes steps and gets other bits than it had published."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from demo_runs import SMALL, demo, wait_for

from paceline.config.load import read_tables, write_tables
from paceline.local.patience import patient

LEARNS = str(Path(__file__).parents[2] / "benchmarks/workloads/two_digits/workload.toml")
"""Half of the policy's first answers are right, so that every step changes the weights."""

pytestmark = [pytest.mark.corrupt, pytest.mark.timeout(300)]


def test_a_trainer_killed_before_its_checkpoint_goes_on_with_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    short = ("--config", LEARNS, "--steps", "4", *SMALL)
    process = demo(tmp_path, *short, "policy_trainer.ranks=1")
    lines = wait_for(process, "step 2/4")
    config = tmp_path / "demo-0-1" / "config.toml"
    settings = read_tables(config)
    settings["policy_trainer"]["ranks"] = 2
    write_tables(config, settings)
    started = next(line for line in lines if line.startswith("policy_trainer started"))
    os.kill(int(started.split("pid ")[1].split(")")[0]), signal.SIGKILL)
    output, _ = process.communicate(timeout=patient(200))
    assert process.returncode == 0, output
    summary = json.loads((tmp_path / "demo-0-1" / "summary.json").read_text())
    assert (summary["steps"], summary["policy_versions"]) == (4, 5)
    assert summary["trajectories_lost"] == 0
    logs = (tmp_path / "demo-0-1" / "logs").glob("policy_trainer*")
    said = "".join(log.read_text() for log in logs)
    assert "served_weights_taken" in said or "version_replaced" in said, said
