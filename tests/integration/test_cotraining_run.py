"""The whole loop: an untrained drafter learns in the rollouts' idle time, is promoted, and drafts
tokens that the policy accepts.

Each trained kind has a run; all kinds but the harvested kind have a drafter phase of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_runs import demo

from paceline.local.patience import patient
from paceline.speculators.kinds import SPECULATORS, SpeculatorKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HARVESTED, STEPS = "eagle", 8
"""The kind that learns in idle time alone, and its steps. Each step leaves it five optimiser steps
on a busy machine.
"""
SERIAL = (
    4,
    "coordinator.drafter_schedule=serial",
    "coordinator.max_drafter_steps=60",
    "coordinator.prompts_per_step=4",
    "gateway.features.share=1.0",
)
"""Steps of the other kinds, and settings that give equal learning per step on any machine: the
rows of half the prompts are as many as they learn from.
"""
TRAINED = [kind for kind in SPECULATORS.values() if kind.trained]


@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.name)
def test_a_run_promotes_drafters_and_more_of_their_drafts_are_accepted(
    kind: SpeculatorKind, tmp_path: Path
) -> None:
    from_nothing = (
        f"gateway.drafter={kind.name}",
        f"drafter_trainer.drafter={kind.name}",
        f"gateway.speculation.arms={json.dumps(['off', *kind.arms])}",
        f"coordinator.evaluation.probe_arm={kind.arms[-1]}",
        "drafter_trainer.optimizer.lr=5e-3",
        "drafter_trainer.gate.interval_steps=20",
        "coordinator.evaluation.heldout_prompts=16",
        "coordinator.evaluation.probe_prompts=32",
    )
    count, *learns = (STEPS,) if kind.name == HARVESTED else SERIAL
    process = demo(tmp_path, "--steps", str(count), *from_nothing, *learns)
    output, _ = process.communicate(timeout=patient(600))
    assert process.returncode == 0, output
    run = tmp_path / "demo-0-1"
    summary = json.loads((run / "summary.json").read_text())
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    served = [int(step["versions"].get("drafter", 0)) for step in steps]
    assert served[0] == 0
    # Promoted by the end of the run: on a busy machine the first promotion may be for the next
    # step.
    assert summary["gate_decisions"].get("promoted", 0) >= 1, summary["gate_decisions"]
    # A drafter may be rolled back to the drafter before it; new drafters arrive in order.
    assert list(dict.fromkeys(served)) == sorted(set(served))
    # a fresh dflash drafter begins at 1.33, the other kinds begin at 1.0
    assert summary["accept_len_last"] > summary["accept_len_first"] + 0.1
    assert summary["drafter_steps"] >= 2 * count
    arms = [name for step in steps for name in step["arm_rounds"]]
    assert any(name.startswith(f"{kind.name}:") for name in arms)
    drafted = [step for step in steps if step.get("accept_length")]
    assert drafted
    for step in drafted:
        rounds, tokens = (
            sum(map(int, step[name].values()))
            for name in ("arm_drafted_rounds", "arm_round_tokens")
        )
        assert rounds == int(step["drafted_rounds"])
        assert tokens / rounds == pytest.approx(step["accept_length"])
    if kind.name == HARVESTED:  # the run waits for other kinds in their own phase
        assert summary["preempt_wait_share"] < 0.05
