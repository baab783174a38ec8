"""The coordinator's settings."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.load import load_config
from paceline.errors import ConfigError
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.tasks import MAX_SAMPLES


def test_no_evaluation_is_made_without_held_out_tasks() -> None:
    settings = CoordinatorConfig().machine_settings(workers=2)
    assert (settings.accuracy_enabled, settings.probe_enabled, settings.slots) == (False, False, 2)


def test_a_tensor_parallel_worker_holds_several_slots() -> None:
    config = CoordinatorConfig.model_validate({"slots_per_worker": 4, "heldout_path": "h.jsonl"})
    settings = config.machine_settings(workers=2)
    assert (settings.slots, settings.accuracy_enabled, settings.probe_enabled) == (8, True, True)


TASKS = {"tasks_path": "t.jsonl"}
HELDOUT = {"heldout_path": "h.jsonl"}
EXTERNAL = {"environment": "external"}
BY_GATEWAY = {"evaluation": {"environment": "single_turn", "reward": "math_answer"}}


@pytest.mark.parametrize(
    ("keys", "open_traffic", "evaluated_by"),
    [
        (TASKS | HELDOUT, False, ("single_turn", "math_answer")),
        (TASKS | EXTERNAL | HELDOUT, False, ("external", "math_answer")),
        (TASKS | EXTERNAL | {"reward": "agent"} | HELDOUT, False, ("external", "agent")),
        (
            TASKS | EXTERNAL | {"reward": "agent"} | HELDOUT | BY_GATEWAY,
            False,
            ("single_turn", "math_answer"),
        ),
        (EXTERNAL | {"reward": "agent"}, True, ("external", "agent")),
        (
            EXTERNAL | {"reward": "agent"} | HELDOUT | BY_GATEWAY,
            True,
            ("single_turn", "math_answer"),
        ),
        (
            EXTERNAL | HELDOUT | {"evaluation": {"environment": "single_turn"}},
            True,
            ("single_turn", "math_answer"),
        ),
    ],
)
def test_combinations_of_tasks_environments_and_rewards_that_work(
    keys: dict[str, Any], open_traffic: bool, evaluated_by: tuple[str, str]
) -> None:
    config = CoordinatorConfig.model_validate(keys)
    config.check()
    assert (config.open_traffic, config.evaluated_by) == (open_traffic, evaluated_by)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {},
            r"no training tasks; set coordinator.tasks_path; seen: coordinator.environment=single_turn",
        ),
        (HELDOUT, "no training tasks"),
        (
            EXTERNAL | {"later": {3: {"tasks_path": "l.jsonl"}}},
            "later needs coordinator.tasks_path",
        ),
        (
            TASKS | {"reward": "agent"},
            r"coordinator.reward=agent needs an agent.*environment=single_turn",
        ),
        (
            EXTERNAL | HELDOUT,
            r"nobody claims held-out tasks; set coordinator.evaluation.environment; seen: external",
        ),
        (
            EXTERNAL
            | {"reward": "agent"}
            | HELDOUT
            | {"evaluation": {"environment": "single_turn"}},
            "coordinator.evaluation.reward=agent needs an agent",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_setting_to_change(
    keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        CoordinatorConfig.model_validate(keys).check()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["max_policy_lag=1"], "schedule=sync; seen: 1; allowed: 0"),
        (["schedule=one_step_off", "max_policy_lag=2"], "one_step_off; seen: 2; allowed: 1"),
        (["schedule=fully_async", "max_policy_lag=0"], "fully_async; seen: 0; allowed: >= 1"),
        (["placement=disaggregated"], "disaggregated; seen: 0; allowed: >= 1"),
        (["learner_slots=1"], "colocated; seen: 1; allowed: 0"),
        (["schedule=one_step_off", "drafter_schedule=serial"], "a serial drafter"),
    ],
)
def test_schedules_and_placements_that_contradict_other_settings_are_refused(
    words: list[str], says: str
) -> None:
    config = load_config(CoordinatorConfig, "coordinator", [], ["tasks_path=t.jsonl", *words])
    with pytest.raises(ConfigError, match=says):
        config.check()


def test_greedy_samples_of_a_task_are_refused_since_they_are_all_the_same() -> None:
    evaluation = {"samples": 4, "temperature": 0.0}
    config = CoordinatorConfig.model_validate({"tasks_path": "t.jsonl", "evaluation": evaluation})
    with pytest.raises(ConfigError, match=r"greedy samples .*seen: 4; allowed: 1"):
        config.check()


def test_open_traffic_has_no_tasks_to_draw_again() -> None:
    config = CoordinatorConfig.model_validate(
        {"environment": "external", "reward": "agent", "dynamic_sampling_rounds": 1}
    )
    with pytest.raises(ConfigError, match="dynamic_sampling_rounds=1; allowed: 0, or tasks_path"):
        config.check()


@pytest.mark.parametrize(
    "settings",
    [
        {"prompts_per_step": 8_192, "samples_per_task": 9},
        {"evaluation": {"heldout_prompts": 8_193, "samples": 8}},
    ],
)
def test_more_samples_than_one_call_may_ask_for_are_refused_before_the_run(
    settings: dict[str, object],
) -> None:
    config = CoordinatorConfig.model_validate({"tasks_path": "t", **settings})
    with pytest.raises(ConfigError, match=f"too many samples.*allowed: 1..{MAX_SAMPLES}"):
        config.check()
