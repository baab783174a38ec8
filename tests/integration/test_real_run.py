"""A run as in examples/real/real.toml, on a pretrained model of 135M parameters, at a size for
tests.
"""

import json
from pathlib import Path

import pytest
from demo_runs import demo, left_over

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]
REAL = Path(__file__).parents[2] / "examples" / "real" / "real.toml"
SIZES = (
    "coordinator.prompts_per_step=2",
    "coordinator.samples_per_task=2",
    "coordinator.sampling.max_tokens=8",
    "coordinator.evaluation.heldout_prompts=2",
    "coordinator.evaluation.probe_prompts=1",
)


def test_a_pretrained_model_trains_two_steps_on_generated_tasks(
    real_model: Path, reasoning_gym: Path, tmp_path: Path
) -> None:
    words = ("--config", str(REAL), "--steps", "2", f"gateway.model={real_model}")
    run = demo(tmp_path, *words, *SIZES)
    shown, _ = run.communicate(timeout=840)
    assert run.returncode == 0, shown
    # one worker with all cores, and what it takes, are printed before the start
    assert "gateway 1 x " in shown
    assert "policy_trainer 1 x " in shown
    assert "disk: at most " in shown
    assert "may run short" not in shown
    assert left_over(tmp_path) == []
    (summary,) = tmp_path.glob("*/summary.json")
    found = json.loads(summary.read_text())
    assert (found["steps"], found["phase"]) == (2, "finished")
    assert found["trajectories_published"] == found["trajectories_trained"] == 2 * 4
    assert found["trajectories_lost"] == 0
    assert (summary.parent / "report.html").is_file()
