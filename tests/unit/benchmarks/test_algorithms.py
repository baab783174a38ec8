"""What a comparison of algorithms says, on runs made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from benchmarks.algorithms import ARMS, compare
from benchmarks.demo_runs import DemoRun
from coordinator.config import CoordinatorConfig
from policy_trainer.algorithm_settings import AnyAlgorithm


def run(seed: int, arm: str, last: float) -> DemoRun:
    summary = {"accuracy_first": 0.5, "accuracy_last": last, "wall_s": 60.0 + seed}
    return DemoRun(seed, arm, summary, [], None)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_configuration_that_its_services_take(arm: str) -> None:
    given: dict[str, dict[str, Any]] = {"coordinator": {"tasks_path": "t"}, "policy_trainer": {}}
    for setting in ARMS[arm]:
        name, value = setting.split("=")
        section, *_, key = name.split(".")
        given[section][key] = value
    CoordinatorConfig.model_validate(given["coordinator"]).check()
    TypeAdapter(AnyAlgorithm).validate_python(given["policy_trainer"])


def test_an_algorithm_is_judged_by_the_median_of_its_seeds() -> None:
    lasts = {"grpo": (0.8, 0.6, 0.9), "rloo": (0.6, 0.9, 0.65)}
    result = compare(
        [run(seed, arm, last) for arm, of in lasts.items() for seed, last in enumerate(of)], 60
    )
    assert [(goal.value, goal.met) for goal in result.goals] == [
        (pytest.approx(0.3), True),
        (pytest.approx(0.15), False),
    ]
    assert result.rows[0]["after"] == "0.800 0.600 0.900"
    assert result.rows[1]["wall s"] == 61.0
