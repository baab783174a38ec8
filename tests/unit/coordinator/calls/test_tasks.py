"""The tasks that a step and an evaluation request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.services.coordinator.calls.tasks import TaskSource
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.machine.state import Evaluation
from paceline.tasks import Task, write_tasks
from paceline.v1.trajectory_pb2 import PURPOSE_EVAL, PURPOSE_TRAIN


def source(directory: Path, *, tasks: int = 5, prompts: int = 3, **keys: object) -> TaskSource:
    write_tasks(
        directory / "train.jsonl",
        [Task(f"t{i}", f"{i}=", str(i), {"split": "train"}) for i in range(tasks)],
    )
    write_tasks(directory / "heldout.jsonl", [Task(f"h{i}", f"{i}=", str(i)) for i in range(8)])
    config = CoordinatorConfig.model_validate(
        {
            "tasks_path": str(directory / "train.jsonl"),
            "heldout_path": str(directory / "heldout.jsonl"),
            "prompts_per_step": prompts,
            "evaluation": {"heldout_prompts": 6, "probe_prompts": 2},
            **keys,
        }
    )
    return TaskSource(config)


def test_a_step_asks_for_the_same_tasks_whenever_it_is_asked(tmp_path: Path) -> None:
    first, again = source(tmp_path).step_request(4, 10), source(tmp_path).step_request(4, 99)
    assert first.tasks == again.tasks
    assert (first.purpose, first.context.step, first.context.epoch) == (PURPOSE_TRAIN, 4, 10)
    assert [task.task_index for task in first.tasks] == [0, 1, 2]
    assert first.tasks[0].metadata["split"] == "train"


def test_a_step_that_spans_two_epochs_holds_no_task_twice(tmp_path: Path) -> None:
    requests = [source(tmp_path).step_request(step, 1) for step in range(20)]
    assert all(len({task.task_id for task in request.tasks}) == 3 for request in requests)
    assert {task.task_id for request in requests for task in request.tasks} == {
        f"t{i}" for i in range(5)
    }


def test_columns_and_a_system_prompt_count_for_training_and_held_out_tasks(tmp_path: Path) -> None:
    given = {"task_columns": {"prompt": "answer", "answer": "prompt"}, "system_prompt": "Short."}
    made = source(tmp_path, **given)
    asked = [
        *made.step_request(0, 1).tasks,
        *made.evaluation_request(Evaluation.ACCURACY, 0, 1).tasks,
    ]
    assert {task.answer for task in asked} == {f"{task.prompt}=" for task in asked}
    for task in asked:
        told = json.loads(task.metadata["messages"])
        assert told == [
            {"role": "system", "content": "Short."},
            {"role": "user", "content": task.prompt},
        ]


def test_tasks_of_another_system_prompt_are_other_tasks(tmp_path: Path) -> None:
    kinds = [source(tmp_path, system_prompt=text).described for text in ("", "Short.", "Long.")]
    assert len(set(kinds)) == 3


def test_group_ids_are_unique_over_steps(tmp_path: Path) -> None:
    groups = [
        task.group_id for step in range(5) for task in source(tmp_path).step_request(step, 1).tasks
    ]
    assert len(set(groups)) == len(groups)


def test_evaluations_draw_alike_at_both_ends_of_a_run(tmp_path: Path) -> None:
    start = source(tmp_path).evaluation_request(Evaluation.ACCURACY, 0, 1)
    end = source(tmp_path).evaluation_request(Evaluation.ACCURACY, 200, 900)
    assert (
        [t.task_id for t in start.tasks]
        == [t.task_id for t in end.tasks]
        == [f"h{i}" for i in range(6)]
    )
    assert (start.run_seed, start.context.step) == (end.run_seed, end.context.step)
    assert (start.purpose, start.samples_per_task, start.sampling.temperature) == (
        PURPOSE_EVAL,
        1,
        1.0,
    )


def test_a_sample_that_is_silent_ends_before_the_run_does(tmp_path: Path) -> None:
    made = source(tmp_path, step_deadline_s=60.0)
    requests = made.step_request(0, 1), made.evaluation_request(Evaluation.ACCURACY, 0, 1)
    assert [request.silence_s for request in requests] == [30.0, 30.0]


def test_turns_are_samples_of_training_alone(tmp_path: Path) -> None:
    made = source(tmp_path, turn_discount=0.0)
    requests = made.step_request(0, 1), made.evaluation_request(Evaluation.ACCURACY, 0, 1)
    assert [request.HasField("turn_discount") for request in requests] == [True, False]
    assert not source(tmp_path).step_request(0, 1).HasField("turn_discount")


def test_the_probe_forces_its_arm_on_its_own_prompts(tmp_path: Path) -> None:
    request = source(tmp_path).evaluation_request(Evaluation.PROBE, 10, 5)
    assert (request.forced_arm, len(request.tasks), request.capture) == ("eagle:5_1_6", 2, False)


def test_open_traffic_asks_for_groups_and_has_no_tasks(tmp_path: Path) -> None:
    evaluation = {"environment": "single_turn", "reward": "math_answer", "heldout_prompts": 6}
    keys: dict[str, Any] = {
        "tasks_path": "",
        "environment": "external",
        "reward": "agent",
        "evaluation": evaluation,
    }
    request = source(tmp_path, **keys).step_request(4, 10)
    assert (source(tmp_path, **keys).samples_per_step, source(tmp_path).samples_per_step) == (0, 24)
    assert (len(request.tasks), request.open_groups, request.samples_per_task) == (0, 3, 8)
    assert (request.environment, request.reward, request.context.step) == ("external", "agent", 4)
    asked = source(tmp_path, **keys).evaluation_request(Evaluation.ACCURACY, 0, 1)
    assert (asked.environment, asked.reward, asked.open_groups) == ("single_turn", "math_answer", 0)
    assert [task.task_id for task in asked.tasks] == [f"h{i}" for i in range(6)]


def test_drawn_tasks_may_be_offered_to_agents_and_evaluated_by_the_gateway(tmp_path: Path) -> None:
    made = source(tmp_path, environment="external", evaluation={"environment": "single_turn"})
    request = made.step_request(0, 1)
    assert (len(request.tasks), request.open_groups, request.environment) == (3, 0, "external")
    asked = made.evaluation_request(Evaluation.PROBE, 0, 1)
    assert (asked.environment, asked.reward) == ("single_turn", "math_answer")


def test_too_few_tasks_for_a_step_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"seen: 9; allowed: 1\.\.5"):
        source(tmp_path, prompts=9)


def test_other_tasks_come_from_their_step_on_and_evaluations_follow_them(tmp_path: Path) -> None:
    for name in ("later", "later_heldout"):
        write_tasks(
            tmp_path / f"{name}.jsonl", [Task(f"{name}{i}", f"{i}=", str(i)) for i in range(4)]
        )
    later = {"tasks_path": str(tmp_path / "later.jsonl")}
    held = {"heldout_path": str(tmp_path / "later_heldout.jsonl")}
    first = {"tasks_path": str(tmp_path / "train.jsonl")}
    tasks = source(tmp_path, later={"4": first, "2": later | held})
    drawn = [{task.task_id[0] for task in tasks.step_request(step, 1).tasks} for step in range(6)]
    assert drawn == [{"t"}] * 2 + [{"l"}] * 2 + [{"t"}] * 2
    asked = [
        tasks.evaluation_request(Evaluation.PROBE, finished, 1).tasks[0].task_id
        for finished in range(7)
    ]
    assert asked == ["h0"] * 3 + ["later_heldout0"] * 4
    kept = source(tmp_path, later={"2": later})
    assert kept.evaluation_request(Evaluation.PROBE, 4, 1).tasks[0].task_id == "h0"


def test_later_tasks_are_checked_at_the_start(tmp_path: Path) -> None:
    write_tasks(tmp_path / "few.jsonl", [Task("a", "1=", "1")])
    with pytest.raises(ConfigError, match="has too few tasks"):
        source(tmp_path, later={"2": {"tasks_path": str(tmp_path / "few.jsonl")}})


def test_a_later_round_asks_for_tasks_that_the_step_has_not_had_at_their_places(
    tmp_path: Path,
) -> None:
    def drawn(step: int, number: int, *places: int) -> list[tuple[int, str, str]]:
        tasks = source(tmp_path, tasks=9, dynamic_sampling_rounds=2)
        request = tasks.step_request(step, 5, number, places)
        return [(task.task_index, task.task_id, task.group_id) for task in request.tasks]

    for step in range(6):
        first, second = drawn(step, 1, 0, 1, 2), drawn(step, 2, 0, 1, 2)
        assert len({task for _, task, _ in [*drawn(step, 0), *first, *second]}) == 9
        assert len({group for _, _, group in [*drawn(step, 0), *first, *second]}) == 9
        assert drawn(step, 1, 2) == first[2:], "whatever the other places do"
        assert [place for place, _, _ in drawn(step, 2, 0, 2)] == [0, 2]
    assert len({tuple(task for _, task, _ in drawn(step, 1, 0, 1, 2)) for step in range(6)}) > 1


def test_the_tasks_of_a_step_do_not_depend_on_what_stood_in_for_others(tmp_path: Path) -> None:
    for step in range(6):
        plain = source(tmp_path, tasks=9).step_request(step, 1)
        choosy = source(tmp_path, tasks=9, dynamic_sampling_rounds=2).step_request(step, 1)
        assert plain.tasks == choosy.tasks


def test_too_few_tasks_for_the_rounds_are_refused_with_the_number_that_they_allow(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"dynamic_sampling_rounds.*seen: 2; allowed: 0\.\.1"):
        source(tmp_path, tasks=8, dynamic_sampling_rounds=2)


def test_an_evaluation_has_samples_and_sampling_of_its_own_and_the_probe_has_not(
    tmp_path: Path,
) -> None:
    own = {"heldout_prompts": 6, "samples": 4, "temperature": 0.6, "top_p": 0.95, "max_tokens": 99}
    made = source(tmp_path, evaluation=own, sampling={"max_tokens": 50})
    asked = made.evaluation_request(Evaluation.ACCURACY, 3, 1)
    sampling = asked.sampling
    assert (asked.samples_per_task, sampling.max_tokens) == (4, 99)
    assert (sampling.temperature, sampling.top_p) == pytest.approx((0.6, 0.95))
    probe = made.evaluation_request(Evaluation.PROBE, 3, 1)
    assert (probe.samples_per_task, probe.sampling.temperature, probe.sampling.max_tokens) == (
        *(1, 1.0),
        50,
    )
    plain = source(tmp_path, sampling={"max_tokens": 50}).evaluation_request(
        Evaluation.ACCURACY, 3, 1
    )
    assert (plain.samples_per_task, plain.sampling) == (1, probe.sampling)


def test_tasks_too_large_for_one_call_are_refused_before_the_run_begins(tmp_path: Path) -> None:
    source(tmp_path)
    large = [Task(f"t{i}", "x", "", {"cases": "y" * (3 << 20)}) for i in range(3)]
    write_tasks(tmp_path / "large.jsonl", large)
    whole = {"tasks_path": str(tmp_path / "large.jsonl")}
    source(tmp_path, prompts=2, **whole)
    with pytest.raises(ConfigError, match=r"line 3: .* lower coordinator\.prompts_per_step; seen"):
        source(tmp_path, prompts=3, **whole)
    with pytest.raises(ConfigError, match=r"evaluation\.heldout_prompts"):
        source(tmp_path, heldout_path=str(tmp_path / "large.jsonl"))
