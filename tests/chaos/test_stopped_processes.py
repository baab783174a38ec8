"""Every process of a run is stopped (SIGSTOP) in turn: each is detected, killed and replaced within
seconds, and nothing is lost.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from demo_runs import SMALL, demo, wait_for

from benchmarks.chaos.system import PARTS
from benchmarks.processes import running
from paceline.local.child import LIMIT_S
from paceline.local.patience import patient

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(480)]

STEPS = 1000
"""More steps than the time allows: the test ends the run after stopping each of its processes."""


def stopped_s(pid: int) -> float:
    """Stops a process; returns the seconds until the kernel reports its end."""
    handle = os.pidfd_open(pid)
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    ended, _, _ = select.select([handle], [], [], patient(60))
    os.close(handle)
    assert ended, "nobody has killed it"
    return time.monotonic() - began


def test_every_process_of_a_run_that_is_stopped_is_replaced_within_seconds(tmp_path: Path) -> None:
    process = demo(tmp_path, "--steps", str(STEPS), *SMALL)
    lines = wait_for(process, "step 1/")
    pids = {
        found[1]: int(found[2])
        for line in lines
        if (found := re.match(r"(\w+) started .*\(pid (\d+)\)", line))
    }
    seen_s, late = {}, {}

    def stop(name: str, pid: int) -> None:
        seen_s[name] = stopped_s(pid)
        limit_s = LIMIT_S + patient(LIMIT_S / 3) + 1.0  # patience follows the present load
        if seen_s[name] >= limit_s and name != "redis":
            late[name] = (seen_s[name], limit_s)

    for part, (service, module) in PARTS.items():
        stop(part, running(module, process.pid)[-1].pid)
        wait_for(process, f"{service} recovered")
    for service in ("gateway", "policy_trainer", "drafter_trainer", "coordinator", "redis"):
        stop(service, pids[service])
        wait_for(process, f"{service} healthy")
    # Redis sends no heartbeats: it is pinged every 1.5 s, and an answer may take as long.
    asked_s = seen_s.pop("redis")
    assert asked_s < LIMIT_S / 2 + patient(LIMIT_S) + 1.0
    told = {name: round(seconds, 2) for name, seconds in seen_s.items()}
    print(f"redis {asked_s:.2f} s", json.dumps(told))
    run = tmp_path / "demo-0-1"
    stop_run = [sys.executable, "-m", "paceline.cli.main", "stop", str(run)]
    subprocess.run(stop_run, timeout=patient(120), check=True, capture_output=True)
    output, _ = process.communicate(timeout=patient(120))
    assert process.returncode == 0, output
    assert late == {}
    summary = json.loads((run / "summary.json").read_text())
    assert 2 <= summary["steps"] < STEPS
    assert summary["policy_versions"] == summary["steps"] + 1
    assert summary["trajectories_lost"] == 0
