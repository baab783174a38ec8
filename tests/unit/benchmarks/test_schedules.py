"""The comparison of schedules: its conclusions on hand-made runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.demo_runs import DemoRun
from benchmarks.schedules import arms, chosen_arms, compare, staleness, tokens_s, waiting
from paceline.errors import InvalidInput
from paceline.services.coordinator.config import CoordinatorConfig


def run(arm: str, step_s: float, ages: dict[str, int], accuracy: float = 0.8) -> DemoRun:
    """Ten steps of 1,000 tokens; the first takes a minute, as services start in it."""
    steps: list[dict[str, Any]] = [
        {
            "step": str(number),
            "policy": {"batch_tokens": 1000.0},
            "finished_at_s": 60 + step_s * number,
            "policy_s": 0.5,
            "preempt_wait_s": 0.25,
            "reward_mean": 0.1 * number,
            "staleness": ages,
        }
        for number in range(10)
    ]
    summary = {"accuracy_first": 0.5, "accuracy_last": accuracy, "wall_s": 60 + 9 * step_s}
    return DemoRun(0, arm, summary, steps, None)


def test_every_arm_is_a_configuration_that_the_coordinator_takes() -> None:
    assert len(arms()) == 6
    for settings in arms().values():
        own = [one.removeprefix("coordinator.") for one in settings if "coordinator." in one]
        CoordinatorConfig.model_validate(
            {"tasks_path": "t", **dict(one.split("=") for one in own)}  # as a file has them
        )


def test_the_rate_leaves_the_first_step_out() -> None:
    assert tokens_s(run("sync", 2.0, {"0": 16})) == pytest.approx(500)


def test_the_learner_waits_while_it_neither_trains_nor_gets_its_slots() -> None:
    assert waiting(run("sync", 2.0, {"0": 16})) == pytest.approx(1.25 / 2)


def test_a_faster_schedule_meets_its_goals_and_ages_are_counted() -> None:
    sync, ahead = run("sync", 2.0, {"0": 16}), run("fully_async", 1.0, {"1": 12, "2": 4}, 0.79)
    assert staleness(ahead) == {1: 120, 2: 40}
    result = compare([sync, ahead], 10)
    assert [(goal.value, goal.met) for goal in result.goals] == [
        (0, True),
        (0, True),
        (pytest.approx(2.0), True),
        (pytest.approx(-0.01), True),
    ]
    assert result.rows[1]["samples by age"] == "1:0.75 2:0.25"
    assert result.rows[1]["over sync"] == pytest.approx(2.0)


def test_samples_beyond_the_lag_a_slower_run_and_a_worse_policy_miss_their_goals() -> None:
    sync, ahead = run("sync", 2.0, {"0": 16}), run("one_step_off", 4.0, {"1": 15, "2": 1}, 0.6)
    result = compare([sync, ahead], 10)
    assert [goal.met for goal in result.goals] == [True, False, False, False]
    assert result.goals[1].value == -10


@pytest.mark.parametrize("named", ["fully_async", "sync,fully_async-apart", "sync,later"])
def test_arms_without_their_sync_and_unknown_ones_are_refused(named: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be compared"):
        chosen_arms(named)
