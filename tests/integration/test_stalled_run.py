"""One process of a real run stalls: the alarm names it, and the run continues with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, wait_for

from benchmarks.processes import running
from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def engine_worker(run: subprocess.Popen[str]) -> psutil.Process:
    """The process of an engine worker."""
    return running("paceline.services.rollout_gateway.engines.worker.process", run.pid)[0]


def test_an_alarm_names_the_stopped_worker_and_all_who_wait_for_it(tmp_path: Path) -> None:
    settings = ("coordinator.stall_alarm_s=2", "run.heartbeat_s=0")  # prevents its replacement
    run = demo(tmp_path, "--steps", "200", *SMALL, *settings)
    try:
        wait_for(run, "step 1/200")
        worker = engine_worker(run)
        os.kill(worker.pid, signal.SIGSTOP)
        alarm = wait_for(run, "coordinator impaired: no progress")[-1]
        asked = subprocess.run(
            [sys.executable, "-m", "paceline.cli.main", "doctor", str(tmp_path / "demo-0-1")],
            capture_output=True,
            text=True,
            timeout=patient(60),
            check=False,
        )
        os.kill(worker.pid, signal.SIGCONT)
        wait_for(run, "coordinator recovered: the run goes on")
        run.send_signal(signal.SIGINT)
        assert run.wait(patient(60)) == 130
    finally:
        run.kill()
        run.wait()
    for said in (alarm, asked.stdout):
        assert "coordinator waits for gateway" in said, asked.stderr
        assert f"stopped: process {worker.pid}" in said
        assert "gateway waits for worker" in said
    assert asked.returncode == 1
