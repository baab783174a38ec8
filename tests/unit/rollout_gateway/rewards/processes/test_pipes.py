"""Bytes between the gateway and its children, and episodes as JSON: whole again, or refused."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataLoss, InvalidInput
from rollout_gateway.chat.messages import Message, ToolCall
from rollout_gateway.environments.base import Episode, EpisodeTask
from rollout_gateway.rewards.episode_json import episode_from, episode_to
from rollout_gateway.rewards.processes import pipes

TEXT = st.text(st.characters(), max_size=12)  # lone surrogates included
CALLS = st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(st.builds(Message, ROLES, TEXT, TEXT, CALLS, TEXT, TEXT), max_size=3).map(tuple)
TASKS = st.builds(EpisodeTask, TEXT, TEXT, TEXT, st.dictionaries(TEXT, TEXT, max_size=2))
EPISODES = st.builds(Episode, TASKS, TEXT, st.sampled_from(["stop", "length"]), MESSAGES)


async def received(data: bytes) -> dict[str, Any]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await pipes.receive(reader)


@given(EPISODES)
def test_an_episode_comes_through_a_frame_whole(episode: Episode) -> None:
    frame = pipes.encode(episode_to(episode))
    read = pipes.read(io.BytesIO(frame))
    assert read is not None
    assert episode_from(read) == episode
    assert asyncio.run(received(frame)) == read


@given(st.binary(max_size=64))
def test_bytes_that_are_no_frame_are_the_end_or_data_loss(data: bytes) -> None:
    try:
        read = pipes.read(io.BytesIO(data))
    except DataLoss:
        return
    assert read is None or read == json.loads(data[pipes.HEADER_BYTES :])


@pytest.mark.parametrize("body", [b"1", b"[]", b"\xff", b"", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(DataLoss):
        pipes.decode(body)


def test_an_episode_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "MAX_BYTES", 100)
    with pytest.raises(InvalidInput, match="too large"):
        pipes.encode({"text": "x" * 100})
