"""Runs as in examples/real/real.toml, on a pretrained model of 135M parameters, at a size for
tests.
"""

import json
import re
import subprocess
from pathlib import Path

import psutil
import pytest
from demo_runs import demo, left_over, wait_for

from paceline.local.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]
REAL = Path(__file__).parents[2] / "examples" / "real" / "real.toml"
SIZES = (
    "coordinator.prompts_per_step=2",
    "coordinator.samples_per_task=2",
    "coordinator.sampling.max_tokens=8",
    "coordinator.evaluation.heldout_prompts=2",
    "coordinator.evaluation.probe_prompts=1",
)


def run_steps(real_model: Path, out: Path, steps: int, *words: str) -> subprocess.Popen[str]:
    """A run of `steps` steps with 2 tasks and 2 samples each."""
    config = ("--config", str(REAL), "--steps", str(steps), f"gateway.model={real_model}")
    return demo(out, *config, *SIZES, *words)


def steps_of(run: Path) -> list[dict[str, float]]:
    """The learner's figures of each step."""
    return [json.loads(line)["policy"] for line in (run / "steps.jsonl").read_text().splitlines()]


def test_a_pretrained_model_trains_two_steps_on_generated_tasks(
    real_model: Path, reasoning_gym: Path, tmp_path: Path
) -> None:
    run = run_steps(real_model, tmp_path, 2)
    begun = "".join(wait_for(run, "step 1/2"))
    parent = psutil.Process(run.pid)
    taken = sum(one.memory_full_info().pss for one in (parent, *parent.children(recursive=True)))
    shown = begun + run.communicate(timeout=840)[0]
    assert run.returncode == 0, shown
    told = re.search(r"memory: ([\d,]+) MiB of ", shown)
    assert told, shown
    planned = int(told[1].replace(",", "")) << 20
    assert planned / 3 < taken < planned  # after the first step, all processes
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


def test_a_run_that_is_killed_whole_and_then_loses_its_rank_trains_every_sample(
    real_model: Path, reasoning_gym: Path, tmp_path: Path
) -> None:
    steps, every = 3, "policy_trainer.checkpoint_interval_steps=2"
    first = run_steps(real_model, tmp_path, steps, every)
    wait_for(first, "step 1/3")  # the second step has begun
    parent = psutil.Process(first.pid)
    for process in [*parent.children(recursive=True), parent]:
        process.kill()
    first.communicate(timeout=patient(60))

    again = run_steps(real_model, tmp_path, steps, every, "--resume", "demo-0-1")
    lines = wait_for(again, "step 2/3")
    started = psutil.Process(again.pid).children(recursive=True)
    title = "python -m paceline.services.policy_trainer.rank"
    (rank,) = [one for one in started if " ".join(one.cmdline()).startswith(title)]
    rank.kill()
    shown, _ = again.communicate(timeout=patient(400))
    assert again.returncode == 0, "".join(lines) + shown
    assert "was killed by SIGKILL" in shown
    run = tmp_path / "demo-0-1"
    found = json.loads((run / "summary.json").read_text())
    assert (found["steps"], found["policy_versions"], found["phase"]) == (
        steps,
        steps + 1,
        "finished",
    )
    assert found["trajectories_published"] == found["trajectories_trained"] == steps * 4
    assert found["trajectories_lost"] == 0
    assert left_over(tmp_path) == []


def test_the_trainers_log_probs_of_a_thousand_tokens_are_the_engines(
    real_model: Path, reasoning_gym: Path, tmp_path: Path
) -> None:
    words = (
        "coordinator.prompts_per_step=1",
        "coordinator.sampling.max_tokens=1000",
        "coordinator.sampling.temperature=2.0",  # the end of text is rarely drawn
        "gateway.engine.max_sequence_tokens=1280",
    )
    run = run_steps(real_model, tmp_path, 1, *words, "policy_trainer.compute_dtype=float32")
    shown, _ = run.communicate(timeout=patient(600))
    assert run.returncode == 0, shown
    (step,) = (tmp_path / "demo-0-1" / "steps.jsonl").read_text().splitlines()
    found = json.loads(step)
    assert max(found["response_length_quantiles"]) == 1000
    assert found["policy"]["trajectories"] == 2
    assert found["policy"]["behavior_gap_max"] < 1e-3


def test_adapters_of_a_pretrained_model_are_trained_and_pushed_alone(
    real_model: Path, reasoning_gym: Path, tmp_path: Path
) -> None:
    adapters = ("rank=8", "publish=adapters")
    words = [f"policy_trainer.adapters.{one}" for one in adapters]
    words += ["policy_trainer.optimizer.lr=1e-3", "policy_trainer.compute_dtype=float32"]
    run = run_steps(real_model, tmp_path, 2, *words)
    shown, _ = run.communicate(timeout=patient(400))
    assert run.returncode == 0, shown
    steps = steps_of(tmp_path / "demo-0-1")
    whole = (real_model / "model.safetensors").stat().st_size
    assert all(0 < one["push_bytes"] < whole / 10 for one in steps)
    assert all(one["behavior_gap"] < 1e-3 for one in steps)


def test_a_pretrained_model_trains_with_a_critic_in_bfloat16(
    real_model: Path, reasoning_gym: Path, tmp_path: Path
) -> None:
    # enough answers that some are right
    words = ("policy_trainer.algorithm.name=ppo", "coordinator.prompts_per_step=16")
    run = run_steps(real_model, tmp_path, 2, *words)
    shown, _ = run.communicate(timeout=patient(400))
    assert run.returncode == 0, shown
    steps = steps_of(tmp_path / "demo-0-1")
    assert all(one["grad_norm"] > 0 and one["value_loss"] > 0 for one in steps)
    assert all(one["skipped_updates"] == 0 for one in steps)
