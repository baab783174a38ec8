"""Answers are read into typed values; whatever else comes is DataLoss, never another exception."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.client import ToolCall
from paceline.client.answers import (
    ChatAnswer,
    OpenedSession,
    Sample,
    SessionInfo,
    Tokens,
    documented_shape,
)
from paceline.client.deltas import Joined
from paceline.client.failures import error_of
from paceline.errors import DataLoss, InvalidInput, PacelineError

NAMES = [
    *(
        "id",
        "choices",
        "message",
        "delta",
        "content",
        "tool_calls",
        "function",
        "arguments",
        "name",
        "index",
        "usage",
    ),
    *(
        "token_ids",
        "logprobs",
        "token_logprobs",
        "text",
        "prompt_tokens",
        "completion_tokens",
        "state",
        "api_key",
    ),
    *(
        "task",
        "prompt",
        "metadata",
        "reward",
        "turns",
        "loss_mask",
        "behavior_logprobs",
        "error",
        "type",
        "code",
    ),
    *("prompt_tokens_details", "cached_tokens", "finish_reason", "reasoning_content", "group_size"),
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6)
    ),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)
CHAT = {
    "id": "chatcmpl-1",
    "choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


@given(data=OBJECTS)
def test_json_of_any_shape_is_read_or_is_data_loss(data: dict[str, Any]) -> None:
    for read in (
        ChatAnswer.read,
        Tokens.read,
        SessionInfo.read,
        OpenedSession.read,
        Sample.read,
        Joined().add,
    ):
        with contextlib.suppress(DataLoss), documented_shape():
            try:
                read(data)
            except PacelineError as error:
                assert isinstance(error, DataLoss) or "error" in data  # noqa: PT017


@given(changed=st.sampled_from(["id", "choices", "usage", "message", "content"]), value=VALUES)
def test_one_wrong_field_of_an_answer_is_data_loss_or_harmless(changed: str, value: Any) -> None:
    data = json.loads(json.dumps(CHAT))
    place = {"message": data["choices"][0], "content": data["choices"][0]["message"]}.get(
        changed, data
    )
    place[changed] = value
    with contextlib.suppress(DataLoss), documented_shape():
        answer = ChatAnswer.read(data)
        assert isinstance(answer.text, str)
        assert answer.raw is data


@given(
    status=st.integers(400, 599),
    body=st.binary(max_size=40) | VALUES.map(lambda one: json.dumps(one).encode()),
)
def test_any_body_under_any_status_is_an_error_of_ours(status: int, body: bytes) -> None:
    assert isinstance(error_of(status, body), PacelineError)


def test_arguments_of_tool_calls_are_read_when_they_are_an_object() -> None:
    assert ToolCall("c", "f", '{"a": [1]}').parsed() == {"a": [1]}
    assert ToolCall("c", "f", "").parsed() == {}
    for text in ("{", "[1]", "7"):
        with pytest.raises(InvalidInput, match="tool call"):
            ToolCall("c", "f", text).parsed()
