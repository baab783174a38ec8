"""A session's states, quotas and rewards."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_turns import SAMPLING, said, session, turn

from paceline.errors import (
    FailedPrecondition,
    InvalidInput,
    NotFound,
    ResourceExhausted,
    TrainabilityError,
)
from paceline.services.rollout_gateway.engines.sampling import UNSEEDED, Sampling
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.sessions import Assignment, FailReason, SessionState
from paceline.services.rollout_gateway.sessions.session import Grant
from paceline.v1 import trajectory_pb2 as tpb

UNTRAINED = Assignment("run", trainable=False)


def at(temperature: float) -> Sampling:
    return Sampling(UNSEEDED, 8, temperature)


def test_a_failed_generation_leaves_no_trace() -> None:
    where = session()
    where.begin(SAMPLING, 3)
    assert where.active
    where.end(3, None)
    assert not where.active
    assert where.trajectories() == []


def test_what_is_said_after_the_end_leaves_no_trace() -> None:
    where = session()
    where.begin(SAMPLING, 1)
    where.close()
    where.end(1, turn(None, [1], [2]))
    assert where.trajectories() == []
    assert not where.active


def test_the_same_reward_is_idempotent_and_another_is_refused() -> None:
    where = session()
    where.score(Grant(0.5))
    where.score(Grant(0.5))
    with pytest.raises(FailedPrecondition, match="another reward") as refused:
        where.score(Grant(0.6))
    assert (refused.value.reason, refused.value.seen, refused.value.allowed) == (
        "REWARD_CONFLICT",
        "0.6",
        "0.5",
    )
    assert where.reward == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e15])
@pytest.mark.parametrize("key", ["", "k"])
def test_a_reward_is_finite(value: float, key: str) -> None:
    with pytest.raises(InvalidInput, match="finite"):
        session().score(Grant(value, accumulate=bool(key), idempotency_key=key))


def test_a_turn_gets_its_own_reward() -> None:
    where = session()
    first, second = said(where, None, name="a"), said(where, None, name="b")
    where.score(Grant(1.0, "b"))
    where.score(Grant(1.0, "b"))
    assert (first.reward, second.reward, where.reward) == (None, 1.0, None)
    assert where.scored
    with pytest.raises(FailedPrecondition, match="another reward"):
        where.score(Grant(2.0, "b"))
    with pytest.raises(NotFound, match="no such completion; seen: c; allowed: a, b"):
        where.score(Grant(1.0, "c"))


@settings(max_examples=60, deadline=None)
@given(
    posts=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "one"])), max_size=12)
)
def test_accumulated_rewards_add_up_once_per_key(posts: list[tuple[str, str]]) -> None:
    where = session()
    one = said(where, None, name="one")
    values = {"a": 0.5, "b": -1.25, "c": 2.0, "d": 0.0}
    expected = {"": 0.0, "one": 0.0}
    seen: dict[str, str] = {}
    for key, completion in posts:
        grant = Grant(values[key], completion, accumulate=True, idempotency_key=key)
        if seen.setdefault(key, completion) != completion:
            with pytest.raises(FailedPrecondition, match="another reward"):
                where.score(grant)
            continue
        where.score(grant)
    for key, completion in seen.items():
        expected[completion] += values[key]
    assert (where.reward or 0.0, one.reward or 0.0) == (expected[""], expected["one"])
    assert (where.reward is None) == ("" not in seen.values())


def test_a_key_names_one_value() -> None:
    where = session()
    where.score(Grant(1.0, accumulate=True, idempotency_key="k"))
    with pytest.raises(FailedPrecondition, match=r"another reward; seen: 2\.0; allowed: 1\.0"):
        where.score(Grant(2.0, accumulate=True, idempotency_key="k"))
    with pytest.raises(InvalidInput, match="idempotency_key"):
        where.score(Grant(1.0, accumulate=True))


def test_accumulated_rewards_stay_finite() -> None:
    where = session()
    where.score(Grant(1e15, accumulate=True, idempotency_key="a"))
    for _ in range(2):
        with pytest.raises(InvalidInput, match="finite"):
            where.score(Grant(1e15, accumulate=True, idempotency_key="b"))
    assert where.reward == 1e15


def test_keys_are_bounded() -> None:
    where = session(max_turns=2)
    for index in range(4):
        where.score(Grant(1.0, accumulate=True, idempotency_key=str(index)))
    with pytest.raises(ResourceExhausted, match="too many rewards"):
        where.score(Grant(1.0, accumulate=True, idempotency_key="more"))
    where.score(Grant(1.0, accumulate=True, idempotency_key="0"))
    assert where.reward == 4.0


def test_endings() -> None:
    scored, turn_scored, unscored, aborted, failed = (session(name) for name in "abcde")
    scored.score(Grant(0.0))
    turn_scored.score(Grant(0.0, said(turn_scored, None).completion_id))
    assert scored.close()
    assert not scored.close(abort=True)
    turn_scored.close()
    unscored.close()
    aborted.close(abort=True)
    failed.close(fail=FailReason.DATA)
    states = [one.state for one in (scored, turn_scored, unscored, aborted, failed)]
    assert states == [
        SessionState.FINAL,
        SessionState.FINAL,
        SessionState.UNSCORED,
        SessionState.ABORTED,
        SessionState.FAILED,
    ]
    assert [one.outcome for one in (scored, failed)] == ["final", "failed:data"]
    assert all(one.ended.is_set() for one in (scored, failed))
    with pytest.raises(FailedPrecondition, match="unscored"):
        unscored.score(Grant(1.0))
    with pytest.raises(FailedPrecondition, match="failed: data") as refused:
        failed.begin(SAMPLING, 1)
    assert refused.value.reason == "SESSION_ENDED"


def test_a_reward_posted_again_after_the_end_changes_nothing() -> None:
    where = session()
    where.score(Grant(1.0))
    where.score(
        Grant(0.5, said(where, None, name="a").completion_id, accumulate=True, idempotency_key="k")
    )
    where.close()
    where.score(Grant(1.0))
    where.score(Grant(0.5, "a", accumulate=True, idempotency_key="k"))
    for late in (Grant(2.0), Grant(0.5, "a", accumulate=True, idempotency_key="other")):
        with pytest.raises(FailedPrecondition, match="has ended"):
            where.score(late)
    assert (where.reward, where.tree.turns[0].reward) == (1.0, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"top_p": 0.9},
        {"top_k": 3},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {7: 0.0}},
        {"json_schema": "{}"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_sampling_that_cannot_be_trained_is_named(change: dict[str, Any]) -> None:
    asked = tpb.SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **change})
    sampling = wire.sampling_from(asked)
    with pytest.raises(TrainabilityError, match=next(iter(change))):
        session().begin(sampling, 1)
    session(about=UNTRAINED).begin(sampling, 1)


@pytest.mark.parametrize(
    "change", [{"repetition_penalty": 0.0}, {"repetition_penalty": 1.0}, {"top_p": 1.0}]
)
def test_a_setting_that_is_off_can_be_trained(change: dict[str, Any]) -> None:
    asked = tpb.SamplingParams(temperature=1.0, max_tokens=8, **change)
    session().begin(wire.sampling_from(asked), 1)


def test_a_trained_session_keeps_one_temperature() -> None:
    where = session()
    said(where, None)
    with pytest.raises(TrainabilityError, match="one temperature"):
        where.begin(at(0.5), 1)
    untrained = session(about=UNTRAINED)
    said(untrained, None)
    untrained.begin(at(0.5), 1)


def test_generations_under_way_count_for_the_temperature_and_failed_ones_do_not() -> None:
    where = session()
    where.begin(at(1.0), 1)
    with pytest.raises(TrainabilityError, match="one temperature"):
        where.begin(at(0.5), 1)
    where.end(1, None)
    where.begin(at(0.5), 1)


def test_parallel_generations_have_a_quota() -> None:
    where = session(max_parallel=2)
    where.check(SAMPLING, ahead=1)
    with pytest.raises(ResourceExhausted, match="under way; seen: 2; allowed: 2"):
        where.check(SAMPLING, ahead=2)
    for _ in range(2):
        where.begin(SAMPLING, 1)
    with pytest.raises(ResourceExhausted, match="under way"):
        where.begin(SAMPLING, 1)
    where.end(1, None)
    where.begin(SAMPLING, 1)


def test_turns_have_a_quota() -> None:
    where = session(max_turns=2)
    said(where, None)
    where.begin(SAMPLING, 1)
    with pytest.raises(FailedPrecondition, match="used up its generations; seen: 2"):
        where.begin(SAMPLING, 1)


def test_tokens_have_a_quota_that_counts_a_shared_beginning_once() -> None:
    where = session(max_tokens=10)
    root = said(where, None, range(6), [7])
    where.begin(SAMPLING, 1)
    where.begin(SAMPLING, 1)
    where.end(1, turn(root, [8], [9, 9]))
    with pytest.raises(FailedPrecondition, match="used up its tokens; seen: 10"):
        where.begin(SAMPLING, 1)


def test_planned_generations_have_numbers_of_their_own() -> None:
    where = session()
    assert [where.numbered(2), where.numbered(1), where.numbered(3)] == [0, 2, 3]
    assert where.generations == 6
