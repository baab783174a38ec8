"""What a comparison of algorithms says, on runs made by hand."""

from __future__ import annotations

import pytest

from benchmarks.algorithms import ARMS, LATE, compare, late_picture
from benchmarks.demo_runs import DemoRun, two_digits
from paceline.cli.plan import plan_run


def run(seed: int, arm: str, last: float) -> DemoRun:
    summary = {"accuracy_first": 0.5, "accuracy_last": last, "wall_s": 60.0 + seed}
    return DemoRun(seed, arm, summary, [], None)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_configuration_that_a_run_takes(arm: str) -> None:
    plan_run([two_digits()], ["gateway.engine.workers=2", *ARMS[arm]])


def test_an_algorithm_is_judged_by_the_median_of_its_seeds() -> None:
    lasts = {"grpo": (0.8, 0.6, 0.9), "rloo": (0.6, 0.9, 0.65)}
    result = compare(
        [run(seed, arm, last) for arm, of in lasts.items() for seed, last in enumerate(of)],
        "two_digits, 60 steps",
    )
    assert [(goal.value, goal.met) for goal in result.goals] == [
        (pytest.approx(0.3), True),
        (pytest.approx(0.15), False),
    ]
    assert result.rows[0]["after"] == "0.800 0.600 0.900"
    assert result.rows[1]["wall s"] == 61.0


def test_the_picture_of_late_tokens_has_a_line_for_each_run_and_each_arm_once_in_its_legend() -> (
    None
):
    runs = [
        DemoRun(seed, arm, {}, [{"reward_mean": 0.1 * n} for n in range(9)], None)
        for seed in range(2)
        for arm in LATE
    ]
    drawn = late_picture(runs)
    assert drawn.count('class="line ') == 4
    assert all(drawn.count(f">{arm}</text>") == 1 for arm in LATE)
    assert "var(" not in drawn, "a picture of its own has no page that names its colours"
