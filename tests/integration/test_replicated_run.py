"""A whole run over two gateway replicas, one of which is killed in the middle: every trajectory is
trained once, and the ledger says so.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, wait_for

from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS, SAMPLES = 6, 4, 4
TWO = ("gateway.replicas=2", "gateway.engine.workers=2")


def replicas(run: Path) -> list[psutil.Process]:
    """Processes of the gateway's replicas, by their number."""
    gateway = psutil.Process(int((run / "pids" / "gateway.pid").read_text()))
    found = [one for one in gateway.children() if "replicas.process" in " ".join(one.cmdline())]
    return sorted(found, key=lambda one: one.cmdline()[-1])


def test_a_run_over_two_replicas_trains_every_trajectory_once_although_one_is_killed(
    tmp_path: Path,
) -> None:
    process = demo(tmp_path, "--steps", str(STEPS), *SMALL, *TWO)
    run = tmp_path / "demo-0-1"
    wait_for(process, "step 2")
    first, second = replicas(run)
    second.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (STEPS, "finished")
    assert summary["trespasses"] == {"engine": 0, "policy": 0, "drafter": 0}
    assert summary["trajectories_lost"] == 0
    wanted = STEPS * PROMPTS * SAMPLES
    assert summary["trajectories_published"] == summary["trajectories_trained"] == wanted
    assert not first.is_running()
    assert "gateway-1 died" in output
