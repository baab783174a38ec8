"""`paceline demo` as a process, small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos.remains import read_remains
from paceline.local.patience import patient

SMALL = (
    "coordinator.prompts_per_step=4",
    "coordinator.samples_per_task=4",
    "coordinator.evaluation.heldout_prompts=8",
    "coordinator.evaluation.probe_prompts=4",
    "coordinator.sampling.max_tokens=48",
)


def demo(out: Path, *arguments: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    """`within`: words before its command."""
    environment = dict(os.environ)
    environment.pop("REDIS_URL", None)
    command = [sys.executable, "-m", "paceline.cli.main", "demo", "--out", str(out)]
    command += ["--lines", "text", *arguments]
    return subprocess.Popen(
        [*within, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def left_over(out: Path) -> list[str]:
    """Command lines of processes that belong to a run below `out`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(out) in line and process.pid != os.getpid():
            found.append(line)
    return found


def wait_for(process: subprocess.Popen[str], text: str) -> list[str]:
    """Read the output up to the line that holds `text`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    pytest.fail(f"{text!r} never came:\n{''.join(lines)}")


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
