"""Figures of a rollout."""

from __future__ import annotations

import hashlib
import json

import pytest

from paceline.services.coordinator.calls.figures import (
    FinishedSamples,
    pulls,
    quantile,
    rollout_figures,
)
from paceline.services.coordinator.calls.trainers import drafter_event
from paceline.services.coordinator.machine.events import GateDecided
from paceline.tagged_json import from_object, to_object
from paceline.v1.drafter_pb2 import GateDecision
from paceline.v1.engine_pb2 import ArmStats
from paceline.v1.rollout_pb2 import (
    ClosedGroup,
    RunTasksRequest,
    SampleFinished,
    TasksFinished,
    TaskSpec,
)
from paceline.v1.trajectory_pb2 import FINISH_REASON_LENGTH, Reward, SpeculationStats


def sample(group: str, index: int, **values: object) -> SampleFinished:
    return SampleFinished(group_id=group, sample_index=index, smallest_gap=1.0, **values)  # type: ignore[arg-type]


def test_samples_are_ordered_by_task_and_sample_and_a_repeated_call_adds_none() -> None:
    tasks = [TaskSpec(group_id=f"g{i}", task_index=i) for i in range(3)]
    samples = FinishedSamples(RunTasksRequest(tasks=tasks))
    for group, index in (("g2", 0), ("g0", 1), ("g0", 0), ("g2", 0)):
        samples.add(sample(group, index))
    assert [(one.group_id, one.sample_index) for one in samples.ordered] == [
        ("g0", 0),
        ("g0", 1),
        ("g2", 0),
    ]


def test_sessions_of_open_traffic_are_kept_apart_and_in_one_order() -> None:
    ended = [
        sample(group, index, session_id=name)
        for group, index, name in (("b", 0, "s1"), ("a", 0, "s3"), ("a", 0, "s2"), ("b", 0, "s1"))
    ]
    samples = FinishedSamples(RunTasksRequest(open_groups=2))
    for one in ended:
        samples.add(one)
    assert [(one.group_id, one.session_id) for one in samples.ordered] == [
        ("a", "s2"),
        ("a", "s3"),
        ("b", "s1"),
    ]


def test_a_step_without_samples_has_figures() -> None:
    figures = rollout_figures([], TasksFinished(), 0.5)
    assert (figures["samples"], figures["reward_mean"], figures["length_quantiles"]) == (
        0,
        0.0,
        (0, 0, 0),
    )


def test_rollout_figures_leave_unscored_samples_out_of_the_reward() -> None:
    ended = [
        sample("a", 0, reward=Reward(value=1.0), response_tokens=4, tokens_hash="aa"),
        sample("a", 1, reward=Reward(value=0.0), response_tokens=8, tokens_hash="bb"),
        SampleFinished(
            group_id="a", sample_index=2, response_tokens=6, tokens_hash="cc", smallest_gap=1e-6
        ),
    ]
    stats = SpeculationStats(
        drafted_rounds=4,
        drafted_round_tokens=10,
        trained_rounds=3,
        trained_round_tokens=9,
        arm_drafted_rounds={"ngram:4_1_5": 1, "eagle:3_1_4": 3},
        arm_round_tokens={"ngram:4_1_5": 1, "eagle:3_1_4": 9},
    )
    closed = [ClosedGroup(group_id="a", scored_sessions=2), ClosedGroup(group_id="b")]
    figures = rollout_figures(
        ended,
        TasksFinished(
            scored=2, unscored=1, response_tokens=18, speculation=stats, closed_groups=closed
        ),
        0.5,
    )
    assert figures["reward_mean"] == 0.5
    assert figures["accept_length"] == 2.5
    assert (figures["trained_round_tokens"], figures["trained_rounds"]) == (9, 3)
    assert figures["arm_drafted_rounds"] == {"eagle:3_1_4": 3, "ngram:4_1_5": 1}
    assert figures["arm_round_tokens"] == {"eagle:3_1_4": 9, "ngram:4_1_5": 1}
    assert figures["near_ties"] == 1
    assert figures["length_quantiles"] == (6, 8, 8)
    assert figures["closed_groups"] == {"a": 2, "b": 0}
    assert figures["tokens_hash"] == hashlib.sha256(b"aabbcc").hexdigest()[:16]


def test_groups_are_counted_by_who_of_their_scored_samples_solved_the_task() -> None:
    rewards = {"none": (0.0, 0.5), "some": (0.0, 1.0), "all": (0.75, 1.0), "also": (1.0,)}
    ended = [
        sample(group, index, reward=Reward(value=value))
        for group, values in rewards.items()
        for index, value in enumerate(values)
    ]
    figures = rollout_figures([*ended, sample("unscored", 0)], TasksFinished(), 0.5)
    assert figures["groups_solved"] == {"by_none": 1, "by_some": 1, "by_all": 2}


def test_the_truncated_share_is_that_of_samples_ended_by_their_limit() -> None:
    ended = [
        sample("a", 0, finish_reason=FINISH_REASON_LENGTH),
        *(sample("a", n) for n in (1, 2, 3)),
    ]
    assert rollout_figures(ended, TasksFinished(), 0.5)["truncated_share"] == 0.25
    assert rollout_figures([], TasksFinished(), 0.5)["truncated_share"] == 0.0


def test_each_part_of_a_mixture_has_its_mean_over_the_samples_that_have_it() -> None:
    parts = ({"format": 1.0, "math": 1.0}, {"format": 0.5}, {})
    ended = [sample("a", i, reward=Reward(parts=one)) for i, one in enumerate(parts)]
    figures = rollout_figures([*ended, sample("a", 3)], TasksFinished(), 0.5)
    assert figures["reward_parts"] == {"format": 0.75, "math": 1.0}
    assert rollout_figures([], TasksFinished(), 0.5)["reward_parts"] == {}


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0),
        ([3], 0.9, 3),
        ([1, 2, 3, 4], 0.5, 2),
        (list(range(1, 11)), 0.9, 9),
        ([1, 5], 1.0, 5),
    ],
)
def test_quantiles_are_values_that_occur(values: list[int], share: float, expected: int) -> None:
    assert quantile(values, share) == expected


def test_pulls_are_summed_over_batch_groups() -> None:
    arms = [ArmStats(arm="off", batch_group=1, pulls=2), ArmStats(arm="eagle:3_1_4", pulls=5)]
    assert pulls([*arms, ArmStats(arm="off", batch_group=5, pulls=3)]) == {
        "eagle:3_1_4": 5,
        "off": 5,
    }


def test_a_decision_of_the_gate_is_kept_with_all_its_numbers() -> None:
    gate = GateDecision(
        drafter_version=3,
        decision="kept",
        kind="eagle",
        candidate_speedup=1.75,
        survival=[0.5, 0.25],
        costs_measured=True,
    )
    event = drafter_event(1.0, 2, "gate", gate)
    assert isinstance(event, GateDecided)
    figures = event.details
    told = {field.name for field in GateDecision.DESCRIPTOR.fields}
    assert told - set(figures) == {"drafter_version", "decision", "promoted"}, (
        "these are the event's"
    )
    assert figures["survival"] == (0.5, 0.25)
    assert figures["costs_measured"] == 1
    assert event == GateDecided(1.0, 2, "kept", 3, figures)
    assert from_object(GateDecided, json.loads(json.dumps(to_object(event)))) == event
