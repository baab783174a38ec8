"""The bench of fixed choices: its runs, and its conclusions on hand-made runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import demo_runs
from benchmarks.demo_runs import DemoRun
from benchmarks.hindsight import ARMS, WORKLOADS, best_fixed, compare, settings_of
from paceline.cli.plan import plan_run
from paceline.tasks.file import read_tasks


def run(arm: str, rate: float, seed: int = 0) -> DemoRun:
    summary = {
        "gate_decisions": {"promoted": 3, "frozen": 1},
        "drafter_steps_per_rl_step": 20.0,
        "preempt_wait_share": 0.002,
    }
    steps = [{"response_tokens": "1000", "rollout_s": 1000 / rate} for _ in range(10)]
    return DemoRun(seed, arm, summary, steps, None)


def runs(**rates: float) -> Mapping[str, list[DemoRun]]:
    return {"demo": [run(arm, rate) for arm, rate in rates.items()]}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_valid_run_of_every_workload(name: str, arm: str, tmp_path: Path) -> None:
    workload = WORKLOADS[name](tmp_path, 10)
    file = workload.file or demo_runs.demo_folder() / "demo.toml"
    plan_run([file], settings_of(workload, arm))


def test_the_memorised_tasks_are_one_step_of_the_workload(tmp_path: Path) -> None:
    WORKLOADS["memorised"](tmp_path, 10)
    assert len(read_tasks(tmp_path / "tasks.jsonl")) == 16


def test_the_best_fixed_choice_is_the_fastest_that_is_not_ours() -> None:
    (of,) = runs(default=200, none=100, ngram=150, frozen=120, cotrained=140).values()
    assert best_fixed(of) == "ngram"


def test_seeds_are_compared_with_themselves() -> None:
    of = [run("default", 100, 0), run("none", 200, 0), run("none", 20, 1), run("default", 10, 1)]
    result = compare({"demo": of}, 10)
    (goal,), (row,) = result.goals, result.rows
    assert (goal.value, goal.met) == (pytest.approx(0.5), False)
    assert row["promoted"] == "3, 3"


@pytest.mark.parametrize(("ours", "met"), [(98.0, True), (96.0, False)])
def test_the_default_is_to_be_within_three_percent_of_the_best_fixed_choice(
    ours: float, met: bool
) -> None:
    result = compare(runs(default=ours, none=50, ngram=100, frozen=70, cotrained=90), 10)
    (goal,) = result.goals
    assert goal.met is met
    assert goal.value == pytest.approx(ours / 100)
    assert "demo: tokens/s, default / ngram" in goal.name
    (row,) = result.rows
    assert (row["ngram"], row["frozen"], row["promoted"]) == (100, 70, "3")
    assert (row["froze"], row["woke"]) == ("1", "0")
