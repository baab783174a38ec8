"""Workers join and leave a run as a person has them do it, judged by what is left in Redis' log:
every sample is trained once, and nobody computed on another's slot.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_runs import SMALL, demo, left_over, wait_for

from benchmarks.chaos.remains import read_remains
from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ELASTIC = ("gateway.engine.workers=1", "gateway.engine.most_workers=2")


def paceline(run: Path, *words: str) -> str:
    """What a command to the run prints."""
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    command += ["--config", str(run / "config.toml")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patient(200), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained_once(out: Path) -> None:
    """Every sample of a run that has ended below `out`."""
    run = out / "demo-0-1"
    assert left_over(out) == []
    (out / "run").symlink_to(run)
    (out / "kept").mkdir()
    (out / "kept" / "hashes.json").write_text("{}")
    branches = read_remains(out, "demo-0-1").branches
    for key, one in branches.items():
        assert one.finals == one.appended == 1, key
        assert [fate.partition(":")[0] for fate in one.fates] == ["trained"], key
    summary = json.loads((run / "summary.json").read_text())
    assert summary["phase"] == "finished"
    assert summary["trajectories_published"] == len(branches) == summary["steps"] * 16
    assert summary["trespasses"] == {"engine": 0, "policy": 0, "drafter": 0}
    for line in (run / "steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        wall_s = summary["slots"] * step["step_s"]
        assert sum(step["slot_s"].values()) == pytest.approx(wall_s, rel=0.01)


def test_a_run_that_goes_over_from_one_worker_to_another_trains_every_sample_once(
    tmp_path: Path,
) -> None:
    process = demo(tmp_path, "--steps", "500", *SMALL, *ELASTIC)
    run = tmp_path / "demo-0-1"
    wait_for(process, "step 1/500")
    assert "worker 1 there" in paceline(run, "add-workers")
    assert "worker 0 gone" in paceline(run, "drain-workers", "0", "--within", "0")
    paceline(run, "stop")
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    trained_once(tmp_path)
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert all(one["idle_s"].get("absent", 0.0) > 0 for one in (steps[0], steps[-1]))


def test_a_gateway_that_is_killed_comes_back_with_the_workers_it_had_and_gives_one_up(
    tmp_path: Path,
) -> None:
    process = demo(tmp_path, "--steps", "500", *SMALL, *ELASTIC)
    run = tmp_path / "demo-0-1"
    (line,) = (one for one in wait_for(process, "step 1/500") if one.startswith("gateway started"))
    assert "worker 1 there" in paceline(run, "add-workers")
    os.kill(int(line.split("pid ")[1].split(")")[0]), signal.SIGKILL)
    assert "worker 0 gone" in paceline(run, "drain-workers", "0")
    with pytest.raises(AssertionError, match="seen: drain 1; allowed: all but one of 1"):
        paceline(run, "drain-workers", "1")
    paceline(run, "stop")
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    assert "gateway restarted" in output
    trained_once(tmp_path)


def test_a_run_that_goes_over_to_one_rank_and_back_trains_every_sample_once(
    tmp_path: Path,
) -> None:
    process = demo(tmp_path, "--steps", "500", *SMALL, *ELASTIC, "policy_trainer.ranks=2")
    run = tmp_path / "demo-0-1"
    wait_for(process, "step 1/500")
    assert "the policy has 1 rank" in paceline(run, "set-ranks", "1")
    assert "the policy has 2 ranks" in paceline(run, "set-ranks", "2")
    with pytest.raises(AssertionError, match="seen: 3 ranks; allowed: 1 to 2"):
        paceline(run, "set-ranks", "3")
    paceline(run, "stop")
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    trained_once(tmp_path)
    log = (run / "logs" / "policy_trainer.log").read_text()
    assert log.count("ranks_ready") == 3
