"""The comparison of algorithms: its conclusions on hand-made runs."""

from __future__ import annotations

import pytest

from benchmarks.algorithms import ARMS, BF16, LATE, compare, late_picture
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


INT8 = "grpo, int8 with TIS"


@pytest.mark.parametrize(
    ("plain", "rounded", "met"),
    [
        ((0.5, 0.6, 0.7), (0.45, 0.55, 0.65), True),
        ((0.60, 0.61, 0.62), (0.55, 0.56, 0.57), False),
        ((0.60, 0.60, 0.60), (0.61, 0.61, 0.61), True),
        ((0.6,), (0.6,), None),
    ],
)
def test_a_profile_keeps_accuracy_where_it_falls_no_further_than_seeds_differ(
    plain: tuple[float, ...], rounded: tuple[float, ...], met: bool | None
) -> None:
    runs = [run(seed, BF16, last) for seed, last in enumerate(plain)]
    runs += [run(seed, INT8, last) for seed, last in enumerate(rounded)]
    runs += [run(seed, "grpo, int8 without", 0.1) for seed in range(len(plain))]
    result = compare(runs, "demo")
    (judged,) = (goal for goal in result.goals if f"less {BF16}" in goal.name)
    assert judged.met is met
    assert judged.value == pytest.approx(rounded[0] - plain[0])
    assert [row["algorithm"] for row in result.rows] == [BF16, INT8, "grpo, int8 without"]


def test_noise_is_two_standard_errors_of_the_difference() -> None:
    runs = [run(seed, BF16, last) for seed, last in enumerate((0.5, 0.6, 0.7))]
    runs += [run(seed, INT8, 0.6) for seed in range(3)]
    assert compare(runs, "demo").goals[-1].goal == pytest.approx(-2 * (0.01 / 3) ** 0.5)


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
