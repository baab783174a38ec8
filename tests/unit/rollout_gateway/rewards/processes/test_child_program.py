"""Lines between the gateway and its children: whole again, or refused."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataLoss, InvalidInput
from paceline.services.rollout_gateway.chat.messages import Message, ToolCall
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards import child_program

TEXT = st.text(st.characters(), max_size=12)  # lone surrogates included
CALLS = st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(st.builds(Message, ROLES, TEXT, TEXT, CALLS, TEXT, TEXT), max_size=3).map(tuple)
TASKS = st.builds(EpisodeTask, TEXT, TEXT, TEXT, st.dictionaries(TEXT, TEXT, max_size=2))
EPISODES = st.builds(Episode, TASKS, TEXT, st.sampled_from(["stop", "length"]), MESSAGES)


received = child_program.ANSWERS.decode


@given(st.none() | EPISODES)
def test_episodes_come_through_a_pipe_whole(episode: Episode | None) -> None:
    asked = child_program.RuleRequest("own:Rule", episode)
    assert child_program.read(io.BytesIO(child_program.encode(asked))) == asked


@pytest.mark.parametrize(
    "answer",
    [
        child_program.Scored(),
        child_program.Refused("no", "x", None),
        child_program.Raised("why"),
        child_program.Scored(0.5),
    ],
)
def test_answers_come_back_whole(answer: child_program.Answer) -> None:
    assert received(child_program.encode(answer)) == answer


def test_a_child_cannot_ask() -> None:
    with pytest.raises(DataLoss):
        received(child_program.encode(child_program.RuleRequest("own:Rule")))


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_the_end_or_data_loss(data: bytes) -> None:
    try:
        assert child_program.read(io.BytesIO(data)) is None
    except DataLoss:
        assert b"\n" in data


@pytest.mark.parametrize("body", [b"1", b"[]", b"\xff", b"", b"[" * 100_000])
def test_a_line_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(DataLoss):
        received(body + b"\n")


def test_an_episode_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_program, "MAX_LINE_BYTES", 100)
    with pytest.raises(InvalidInput, match="too large"):
        child_program.encode(child_program.Raised("x" * 100))
