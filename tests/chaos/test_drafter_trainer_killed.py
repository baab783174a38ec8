"""A run continues without a killed drafter trainer and uses the trainer again after its restart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from demo_runs import SMALL, demo, wait_for

from paceline.config.load import read_tables, write_tables
from paceline.local.patience import patient

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]


def kill_drafter_trainer(lines: list[str]) -> None:
    started = next(line for line in lines if line.startswith("drafter_trainer started"))
    os.kill(int(started.split("pid ")[1].split(")")[0]), signal.SIGKILL)


def finished(process: subprocess.Popen[str], run: Path) -> tuple[str, dict[str, Any]]:
    """Waits for the end of the run; returns its remaining output and its summary."""
    output, _ = process.communicate(timeout=patient(200))
    assert process.returncode == 0, output
    return output, json.loads((run / "summary.json").read_text())


def test_a_drafter_trainer_killed_for_good_after_the_first_step_costs_no_step_and_no_sample(
    tmp_path: Path,
) -> None:
    process = demo(tmp_path, "--steps", "4", *SMALL)
    lines = wait_for(process, "step 1/4")
    config = tmp_path / "demo-0-1" / "config.toml"
    settings = read_tables(config)
    settings["drafter_trainer"]["model"] = str(tmp_path / "nowhere")  # no restart succeeds
    write_tables(config, settings)
    kill_drafter_trainer(lines)
    output, summary = finished(process, config.parent)
    assert re.search(r"drafter_trainer given_up: .*; the run goes on without it", output)
    assert "away: drafter_trainer; the run goes on without it" in output
    assert (summary["steps"], summary["policy_versions"]) == (4, 5)
    assert summary["trajectories_lost"] == 0


def test_a_drafter_trainer_that_is_started_again_trains_again(tmp_path: Path) -> None:
    process = demo(tmp_path, "--steps", "30", *SMALL)
    lines = wait_for(process, "step 1/30")
    kill_drafter_trainer(lines)
    wait_for(process, "all services answer again")
    while not re.search(r"drafter steps [1-9]", wait_for(process, "drafter steps")[-1]):
        pass
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=patient(60))
    assert process.returncode == 130, output
