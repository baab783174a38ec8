"""Events streamed during generation equal the events of the finished answer."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from paceline.services.rollout_gateway.api.http.answers import framed
from paceline.services.rollout_gateway.api.http.openai import ChatAnswers, CompletionAnswers
from paceline.services.rollout_gateway.api.http.openai_schema import ChatBody, CompletionBody
from paceline.services.rollout_gateway.calls.call import Call, Piece
from paceline.services.rollout_gateway.chat.messages import Delta, ToolCall
from paceline.services.rollout_gateway.sessions.names import GatewayNames
from paceline.services.rollout_gateway.sessions.session import Caller
from paceline.v1 import engine_pb2 as pb

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ['"', "\ufffc", '"\ufffc"', '"content":"\ufffc"', "\\", "\n"]
)
CHUNK = pb.TokenChunk(token_ids=[7], behavior_logprobs=[-1.0])


class Gateway:
    """The attributes of a gateway that answers use."""

    names = GatewayNames()
    model = 'a model called "\ufffc"'


class CallSoFar:
    """The attributes of a call that answers use."""

    stopped_by = None


CALL = cast(Call, CallSoFar())


def answering(kind: type[Any], body: object) -> Any:
    class App:
        class state:  # noqa: N801
            gateway = Gateway()

    scope = {"type": "http", "app": App, "state": {"body_bytes": 1}}
    return kind(Request(scope), body, Caller())


def chat(**more: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    return answering(ChatAnswers, ChatBody.model_validate(body | more))


@given(st.lists(st.builds(Delta, TEXT, TEXT | st.just("")), max_size=5), st.integers(0, 1))
def test_events_of_a_conversation_told_at_once_are_the_same(
    deltas: list[Delta], index: int
) -> None:
    answers = chat(n=2)
    for delta in deltas:
        piece = Piece(CHUNK, delta.content, delta)
        told = answers.encode_piece(index, CALL, piece)
        if delta is deltas[0]:
            assert b'"role":"assistant"' in told
        else:
            assert told == framed(answers.piece(index, CALL, piece))


@given(st.lists(TEXT, min_size=2, max_size=5))
def test_events_of_a_completion_told_at_once_are_the_same(texts: list[str]) -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "stream": True})
    answers = answering(CompletionAnswers, body)
    for number, text in enumerate(texts):
        told = answers.encode_piece(0, CALL, Piece(CHUNK, text))
        (choice,) = json.loads(told.removeprefix(b"data: "))["choices"]
        assert choice["text"] == text
        if number:
            assert told == framed(answers.piece(0, CALL, Piece(CHUNK, text)))


@pytest.mark.parametrize(
    "piece",
    [
        Piece(CHUNK, "x", Delta("x"), "stop"),
        Piece(CHUNK, "x", Delta("", "x")),
        Piece(CHUNK, "", Delta(tool_calls=(ToolCall("c", "f", "{}"),))),
    ],
    ids=["the last", "reasoning", "a call"],
)
def test_what_is_more_than_text_is_told_whole(piece: Piece) -> None:
    first, second = chat(), chat()
    for answers in (first, second):
        answers.encode_piece(0, CALL, Piece(CHUNK, "a", Delta("a")))
        answers.encode_piece(0, CALL, Piece(CHUNK, "b", Delta("b")))
    told = json.loads(first.encode_piece(0, CALL, piece).removeprefix(b"data: "))
    (event,) = second.piece(0, CALL, piece)
    assert told["choices"] == event["choices"]


def test_calls_of_a_stream_are_numbered_by_choice() -> None:
    answers = chat(n=2)
    call = ToolCall("c", "f", "{}")
    numbers = []
    for choice, calls in ((0, 1), (1, 2), (0, 2)):
        piece = Piece(CHUNK, "", Delta(tool_calls=(call,) * calls))
        (event,) = answers.piece(choice, CALL, piece)
        numbers += [one["index"] for one in event["choices"][0]["delta"]["tool_calls"]]
    assert numbers == [0, 0, 1, 1, 2]


def test_token_ids_that_are_asked_for_are_in_each_event() -> None:
    answers = chat(return_token_ids=True)
    answers.encode_piece(0, cast(Call, FullCall()), Piece(CHUNK, "a", Delta("a")))
    told = answers.encode_piece(0, CALL, Piece(CHUNK, "b", Delta("b")))
    assert json.loads(told.removeprefix(b"data: "))["choices"][0]["token_ids"] == [7]


class FullCall:
    """The attributes of a call that the first event uses."""

    class plan:  # noqa: N801
        prompt = (1, 2)
