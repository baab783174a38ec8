"""A session's tokens are those of its turns, every generated one trained exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import FailedPrecondition, InvalidInput, NotFound, ResourceExhausted, TrainabilityError
from paceline.trajectory import VersionSpan
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.session import Assignment, Session, Sessions, State

SAMPLING = tpb.SamplingParams(temperature=1.0, max_tokens=8, seed=1)


def turn(session: Session, prompt: list[int], response: list[int], version: int = 0) -> None:
    branch = session.begin(prompt, SAMPLING)
    chunk = pb.TokenChunk(
        token_ids=response,
        behavior_logprobs=[-0.5] * len(response),
        version_spans=[tpb.VersionSpan(start=0, end=len(response), policy_version=version)],
        finish_reason=tpb.FINISH_REASON_STOP,
    )
    session.end(branch, prompt, SAMPLING, chunk)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_generated_token_is_trained_exactly_once(data: st.DataObject) -> None:
    session = Session("s", Assignment("run"))
    spoken: list[int] = []
    marks = iter(range(1000, 9000))
    for _ in range(data.draw(st.integers(1, 6))):
        known = [branch.token_ids for branch in session.branches] or [[]]
        base = data.draw(st.sampled_from(known))
        cut = data.draw(st.sampled_from([len(base), max(len(base) - 1, 0)]))
        prompt = [*base[:cut], *data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))]
        response = [next(marks) for _ in range(data.draw(st.integers(1, 3)))]
        turn(session, prompt, response)
        spoken += response
    trained = Counter(
        token
        for trajectory in session.trajectories()
        for token, bit in zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
        if bit
    )
    assert trained == Counter(spoken)


def test_spans_count_prompt_and_response_together() -> None:
    session = Session("s", Assignment("run"))
    turn(session, [1, 2], [3, 4], version=0)
    turn(session, [1, 2, 3, 4, 5], [6], version=2)
    (trajectory,) = session.trajectories()
    assert trajectory.version_spans == (VersionSpan(2, 4, 0), VersionSpan(5, 6, 2))


def test_a_second_generation_on_a_busy_branch_forks() -> None:
    session = Session("s", Assignment("run"))
    turn(session, [1], [2])
    first = session.begin([1, 2, 3], SAMPLING)
    second = session.begin([1, 2, 3], SAMPLING)
    assert (first.branch_id, second.branch_id) == ("0", "1")


def test_a_failed_generation_leaves_no_trace() -> None:
    session = Session("s", Assignment("run"))
    branch = session.begin([1], SAMPLING)
    session.end(branch, [1], SAMPLING, pb.TokenChunk(token_ids=[2], finish_reason=tpb.FINISH_REASON_ERROR))
    assert session.trajectories() == []


def test_the_same_reward_is_idempotent_and_another_is_refused() -> None:
    session = Session("s", Assignment("run"))
    session.score(0.5)
    session.score(0.5)
    with pytest.raises(FailedPrecondition, match="another reward"):
        session.score(0.6)
    with pytest.raises(InvalidInput, match="finite"):
        session.score(float("nan"))


def test_endings() -> None:
    scored, unscored, aborted = (Session(name, Assignment("run")) for name in "abc")
    scored.score(0.0)
    assert scored.close()
    assert not scored.close(abort=True)
    unscored.close()
    aborted.close(abort=True)
    states = (scored.state, unscored.state, aborted.state)
    assert states == (State.FINAL, State.UNSCORED, State.ABORTED)
    with pytest.raises(FailedPrecondition, match="unscored"):
        unscored.score(1.0)


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
    ],
    ids=lambda change: next(iter(change)),
)
def test_sampling_that_cannot_be_trained_is_named(change: dict[str, Any]) -> None:
    sampling = tpb.SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **change})
    with pytest.raises(TrainabilityError, match=next(iter(change))):
        Session("s", Assignment("run")).begin([1], sampling)
    assert Session("s", Assignment("run", trainable=False)).begin([1], sampling)


@pytest.mark.parametrize("repetition_penalty", [0.0, 1.0])
def test_a_repetition_penalty_that_is_off_can_be_trained(repetition_penalty: float) -> None:
    sampling = tpb.SamplingParams(temperature=1.0, max_tokens=8, repetition_penalty=repetition_penalty)
    assert Session("s", Assignment("run")).begin([1], sampling)


def test_a_trained_session_keeps_one_temperature() -> None:
    session = Session("s", Assignment("run"))
    turn(session, [1], [2])
    with pytest.raises(TrainabilityError, match="one temperature"):
        session.begin([1, 2, 3], tpb.SamplingParams(temperature=0.5, max_tokens=8))


def test_sessions_are_bounded_and_the_silent_end_first() -> None:
    now = [0.0]
    sessions = Sessions(2, timeout_s=10.0, clock=lambda: now[0])
    first, second = sessions.open(Assignment("run")), sessions.open(Assignment("run"))
    with pytest.raises(ResourceExhausted, match="too many"):
        sessions.open(Assignment("run"))
    now[0] = 6.0
    sessions.get(first.session_id)
    now[0] = 11.0
    assert sessions.expired() == [second]
    branch = second.begin([1], SAMPLING)
    assert sessions.expired() == []
    second.end(branch, [1], SAMPLING, None)
    now[0] = 15.9
    assert sessions.expired() == []
    now[0] = 21.0
    assert sessions.expired() == [first, second]
    second.close()
    sessions.remove(second)
    with pytest.raises(FailedPrecondition, match="has ended"):
        sessions.get(second.session_id)
    with pytest.raises(NotFound):
        sessions.get("nobody")
