"""A whole run trains adapters and pushes only adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_runs import demo

from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADAPTERS = (
    "coordinator.prompts_per_step=4",
    "coordinator.samples_per_task=8",
    "coordinator.reward=math_answer",
    "coordinator.evaluation.heldout_prompts=8",
    "coordinator.evaluation.probe_prompts=4",
    "policy_trainer.adapters.rank=4",
    "policy_trainer.adapters.publish=adapters",
    "policy_trainer.optimizer.lr=0.003",
    "policy_trainer.audit.share=0",
)


def test_engines_draw_from_the_start_policy_with_the_adapters_that_were_pushed(
    tmp_path: Path,
) -> None:
    process = demo(tmp_path, "--steps", "4", *ADAPTERS)
    output, _ = process.communicate(timeout=patient(500))
    assert process.returncode == 0, output
    run = tmp_path / "demo-0-1"
    steps = [json.loads(line)["policy"] for line in (run / "steps.jsonl").read_text().splitlines()]
    # Adapters start at zero: from the second step on, an engine without adapters would show a gap.
    assert all(one["behavior_gap"] < 1e-5 for one in steps)
    assert any(one["grad_norm"] > 0 for one in steps)
    whole = Path("examples/demo/policy_start/model.safetensors").stat().st_size
    assert all(0 < one["push_bytes"] < whole / 10 for one in steps)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["policy_versions"] == 5  # includes the start policy
