"""A living run cannot be resumed; a run with a killed owner can."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, wait_for

from paceline.local.patience import patient

pytestmark = [pytest.mark.attack, pytest.mark.timeout(300)]


def files_of(run: Path) -> dict[str, int]:
    """Modification times of the run's settings and locks."""
    return {
        str(path): path.stat().st_mtime_ns for path in (run / "config.toml", *run.glob("pids/*"))
    }


@pytest.fixture
def first(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = demo(tmp_path, "--steps", "40", *SMALL)
    with process:
        yield process
        process.kill()


def test_a_living_run_cannot_be_resumed_and_a_killed_one_can(
    first: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_for(first, "step 1/40")
    run = tmp_path / "demo-0-1"
    before = files_of(run)
    family = psutil.Process(first.pid).children(recursive=True)
    servers = [child for child in family if child.name() == "redis-server"]
    assert len(servers) == 2

    output, _ = demo(tmp_path, "--resume", run.name).communicate(timeout=patient(30))
    refusal = f"the supervisor of {run} runs already; seen: pid {first.pid}, since"
    assert refusal in " ".join(output.split())
    gateway = [
        sys.executable,
        "-m",
        "paceline.services.rollout_gateway",
        "--config",
        str(run / "config.toml"),
    ]
    refused = subprocess.run(
        gateway, capture_output=True, text=True, timeout=patient(30), check=False
    )
    assert refused.returncode == 1
    assert f"the gateway of {run} runs already; seen: pid " in refused.stderr
    assert files_of(run) == before
    assert all(server.is_running() for server in servers)
    wait_for(first, "step 2/40")

    first.kill()
    psutil.wait_procs(family, timeout=patient(20))
    resumed = demo(tmp_path, "--resume", run.name, "--steps", "2")
    output, _ = resumed.communicate(timeout=patient(200))
    assert resumed.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"] >= 2, summary["trajectories_lost"]) == (True, 0)
