"""`paceline demo` over SGLang: the run serves a drafter that has learned from its own captured
rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_runs import SMALL, demo, left_over

from benchmarks.trespasses import read_trespasses
from paceline.local.patience import patient

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
STEPS = 2
LEARNING = (
    "gateway.features.share=1.0",
    "coordinator.drafter_schedule=serial",
    "coordinator.max_drafter_steps=150",
    "coordinator.evaluation.probe_prompts=8",
    "drafter_trainer.max_epochs=1000",
    "drafter_trainer.buffer.judged_every=2",
    "drafter_trainer.gate.interval_steps=50",
    "drafter_trainer.gate.min_positions=100",
    "drafter_trainer.gate.min_groups=2",
    "drafter_trainer.gate.draft_steps=3",
)


def test_a_drafter_learned_from_captured_rows_is_served_and_more_is_accepted(
    tmp_path: Path,
) -> None:
    chosen = (
        f"gateway.engine.ready_deadline_s={patient(180)}",
        "gateway.engine.workers=1",
        "gateway.drafter=eagle3",  # its rows are of four layers
        "drafter_trainer.drafter=eagle3",
        'gateway.speculation.arms=["off","eagle3:3_1_4"]',
        "coordinator.evaluation.probe_arm=eagle3:3_1_4",
    )
    process = demo(
        tmp_path, "--engine", "sglang", "--steps", str(STEPS), *SMALL, *LEARNING, *chosen
    )
    output, _ = process.communicate(timeout=patient(250))
    assert process.returncode == 0, output
    assert left_over(tmp_path) == []
    run = tmp_path / "demo-0-1"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (STEPS, "finished")
    assert summary["trajectories_published"] == summary["trajectories_trained"] == STEPS * 16
    assert summary["trajectories_lost"] == 0
    assert read_trespasses(run) == {"engine": 0, "policy": 0, "drafter": 0}
    assert summary["gate_decisions"].get("promoted", 0) >= 1, summary["gate_decisions"]
    assert summary["accept_len_last"] > summary["accept_len_first"] + 0.1
