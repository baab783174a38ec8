"""Runs `paceline demo` as a process, at a size for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

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


def outcome(run: Path) -> tuple[list[str], str]:
    """Tokens of every step, and the policy that was trained on them."""
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    (policy,) = (run / "checkpoints/policy").glob("step-*/model.safetensors")
    return [step["tokens_hash"] for step in steps], sha256(policy.read_bytes()).hexdigest()


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
