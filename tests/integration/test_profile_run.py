"""A whole run with an operator who changes the policy's rounding, and changes it back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from demo_runs import SMALL, demo, wait_for

from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (
    "coordinator.profiles=['fp8_channel']",
    "policy_trainer.algorithm.correction.weight=token",
    "policy_trainer.audit.share=0",
)


def told(run: Path, *words: str) -> str:
    """Output of a command about the run, which continues until the operator stops it."""
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    done = subprocess.run(
        [*command, "--config", str(run / "config.toml")],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tokens_are_drawn_under_the_profile_of_the_set_that_serves(
    tmp_path: Path,
) -> None:
    run = tmp_path / "demo-0-1"
    process = demo(tmp_path, "--steps", "10000", *SMALL, *SETTINGS)
    try:
        lines = wait_for(process, "step 1/")
        assert "fp8_channel from p" in told(run, "use-profile", "fp8_channel")
        lines += wait_for(process, ".fp8_channel")
        assert "serves under fp8_channel; no profile from p" in told(run, "use-profile", "none")
        while ".fp8_channel" in lines[-1]:
            lines += wait_for(process, "step ")
        told(run, "stop")
        output, _ = process.communicate(timeout=patient(400))
    finally:
        process.terminate()  # harmless after the run's end
    assert process.returncode == 0, "".join(lines) + output

    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    served = [step["versions"].get("profile", "") for step in steps]
    assert [name for name, _ in itertools.groupby(served)] == ["", "fp8_channel", ""]
    for serving, step in zip(served, steps, strict=True):
        gap = step["policy"][f"behavior_gap/numbers={serving or 'float32'}"]
        assert gap == step["policy"]["behavior_gap"]
        assert gap > 1e-4 if serving else gap < 1e-5
