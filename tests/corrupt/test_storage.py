"""Runs with damaged files on disk: the run uses no damaged file, and continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, wait_for

from benchmarks.processes import running
from paceline.local.patience import patient

pytestmark = [pytest.mark.corrupt, pytest.mark.timeout(300)]


def pid_of(lines: list[str], service: str) -> int:
    """Process id of a service, from the lines of the console."""
    started = next(line for line in lines if line.startswith(f"{service} started"))
    return int(started.split("pid ")[1].split(")")[0])


def flip(file: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def newest(directory: Path, prefix: str) -> Path:
    """The checkpoint with the highest number."""
    found = [path for path in directory.glob(f"{prefix}*") if path.name[len(prefix) :].isdigit()]
    return max(found, key=lambda path: int(path.name.removeprefix(prefix)))


def kill(run: subprocess.Popen[str], lines: list[str], service: str) -> None:
    """Kills a service with its children and ranks, so that no rank can write a checkpoint."""
    ended = psutil.Process(pid_of(lines, service))
    ranks = running(f"paceline.services.{service}.rank", run.pid)  # children of the forkserver
    others = [*ended.children(recursive=True), *ranks]
    for process in (ended, *others):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    # The supervisor reaps the service itself.
    _, alive = psutil.wait_procs(others, timeout=patient(20))
    assert not alive


def test_damaged_checkpoints_of_both_trainers_are_left_out(tmp_path: Path) -> None:
    process = demo(
        tmp_path,
        "--steps",
        "6",  # both trainers recover before the last step
        *SMALL,
        "policy_trainer.checkpoint_interval_steps=1",
        "drafter_trainer.checkpoint_interval_s=0.1",
    )
    lines = wait_for(process, "step 3/6")
    checkpoints = tmp_path / "demo-0-1" / "checkpoints"
    kill(process, lines, "policy_trainer")
    policy = newest(checkpoints / "policy", "step-")
    flip(policy / "shards" / "rank-0.safetensors")
    kill(process, lines, "drafter_trainer")
    drafter = newest(checkpoints / "drafter", "checkpoint-")
    flip(drafter / "state.json")

    output, _ = process.communicate(timeout=patient(200))
    assert process.returncode == 0, output
    for damaged in (f"{policy.name}/shards/rank-0.safetensors", f"{drafter.name}/state.json"):
        (line,) = [one for one in output.splitlines() if damaged in one and "impaired" in one]
        assert "is damaged" in line
    summary = json.loads((tmp_path / "demo-0-1" / "summary.json").read_text())
    assert (summary["steps"], summary["policy_versions"]) == (6, 7)
    assert summary["trajectories_lost"] == 0


def test_what_serves_is_pushed_again_when_it_is_damaged_and_the_whole_gateway_gone(
    tmp_path: Path,
) -> None:
    process = demo(tmp_path, "--steps", "4", *SMALL, "run.heartbeat_s=0")
    lines = wait_for(process, "step 2/4")
    coordinator, run = pid_of(lines, "coordinator"), tmp_path / "demo-0-1"
    os.kill(coordinator, signal.SIGSTOP)  # no new version is committed
    try:
        kill(process, lines, "gateway")
        for spooled in ("versions.json", "policy-*/model.safetensors"):
            for file in (run / "spool" / "gateway").glob(spooled):
                flip(file)
        for file in run.rglob("policy_head-*/model.safetensors"):
            flip(file)
        running("paceline.services.drafter_trainer.rank", process.pid)[0].kill()
        awaited = {"does not start", "drafter_trainer recovered"}
        while awaited:
            (line,) = wait_for(process, "")
            awaited -= {one for one in awaited if one in line}
            assert "does not start" not in line or "versions.json is damaged" in line
    finally:
        os.kill(coordinator, signal.SIGCONT)
    output, _ = process.communicate(timeout=patient(200))
    assert process.returncode == 0, output
    assert "recovered: engine worker" in output, output
    mended = (run / "logs" / "coordinator.log").read_text()
    assert "policy_pushed_again" in mended
    assert "set_committed_again" in mended
    log = (run / "logs" / "drafter_trainer.rank-rank0.log").read_text()
    assert "policy head cannot be used" in log
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories_lost"]) == (4, 0)
