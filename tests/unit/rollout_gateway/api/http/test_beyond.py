"""Fields beyond a body's schema: rejected by name, reported, or accepted at values that change
nothing.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.api.http import requests
from paceline.services.rollout_gateway.api.http.anthropic import MessagesBody
from paceline.services.rollout_gateway.api.http.app import OPERATIONS
from paceline.services.rollout_gateway.api.http.beyond import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TOKENS,
    FieldError,
)
from paceline.services.rollout_gateway.api.http.openai_schema import ChatBody, CompletionBody
from paceline.services.rollout_gateway.api.http.responses_schema import ResponsesBody
from paceline.services.rollout_gateway.api.http.sessions import (
    CompleteBody,
    FailBody,
    OpenBody,
    RewardBody,
)
from paceline.services.rollout_gateway.api.http.shapes import Shape
from paceline.services.rollout_gateway.api.http.tokens import TokenizeBody

TABLES = {
    ChatBody: CHAT,
    CompletionBody: COMPLETIONS,
    ResponsesBody: RESPONSES,
    MessagesBody: MESSAGES,
    TokenizeBody: TOKENS,
}
USER = {"role": "user", "content": "Hi"}


def judged(kind: type[requests.B], fields: Any) -> tuple[requests.B, tuple[str, ...]]:
    """A body from its bytes or fields, and its ignored fields."""
    raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return requests.judged(kind, raw)


def parse(kind: type[requests.B], fields: Any) -> requests.B:
    return judged(kind, fields)[0]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


@pytest.mark.parametrize("body", TABLES)
def test_a_body_has_the_table_of_its_api_and_declares_nothing_that_stands_in_it(
    body: type[Shape],
) -> None:
    table = TABLES[body]
    assert body.undeclared is table
    assert not {*table.harmless, *table.neutral} & set(body.model_fields)


@pytest.mark.parametrize("body", [OpenBody, RewardBody, CompleteBody, FailBody])
def test_a_session_takes_nothing_beyond_its_fields(body: type[Shape]) -> None:
    needed = {"value": 1.0, "reason": "infra"}
    fields = {name: value for name, value in needed.items() if name in body.model_fields}
    assert judged(body, fields)[1] == ()
    with pytest.raises(FieldError, match=r"^user: is not served"):
        parse(body, {**fields, "user": "me"})


def test_what_is_harmless_is_told_sorted_and_once() -> None:
    marked = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [marked, marked]}, USER, {**USER, "refusal": "no"}]
    _, ignored = judged(ChatBody, chat(messages=messages, user="me", store=False))
    assert ignored == ("messages[].content[].cache_control", "messages[].refusal", "store", "user")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"functions": [1]}, "functions"),
        ({"messages": [USER, {**USER, "weight": 1}]}, r"messages\[1\]\.weight"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, r"tools\[0\]\.f"),
        ({"stream": True, "stream_options": {"x": 1}}, r"stream_options\.x"),
        ({"modalities": ["audio"]}, r"modalities: is not served; .*allowed: \['text'\]"),
        ({"skip_special_tokens": False}, "skip_special_tokens: .*allowed: True"),
        ({"use_beam_search": 0}, "use_beam_search"),  # no boolean
        ({"x": 0}, "x"),
        ({"x": False}, "x"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(FieldError, match=f"^{named}"):
        parse(ChatBody, chat(**fields))


CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
SENT_BACK = {"provider_specific_fields": {"citations": [1]}}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({**SENT_BACK}, ("messages[].provider_specific_fields",)),
        (
            {"tool_calls": [{**CALL, **SENT_BACK}]},
            (
                "messages[].tool_calls[].index",
                "messages[].tool_calls[].provider_specific_fields",
            ),
        ),
        (
            {"refusal": None, "annotations": [], "audio": None, "function_call": None},
            (),
        ),
        ({"thinking_blocks": [{"type": "thinking"}]}, ("messages[].thinking_blocks",)),
        ({"reasoning_details": [{"text": "hm"}]}, ("messages[].reasoning_details",)),
    ],
)
def test_what_gateways_add_to_an_answer_may_be_sent_back(
    message: dict[str, Any], told: tuple[str, ...]
) -> None:
    said = {"role": "assistant", "content": "Hi", **message}
    assert judged(ChatBody, chat(messages=[USER, said, USER]))[1] == told


@pytest.mark.parametrize("kind", ["text", "thinking", "tool_use"])
def test_marks_of_caches_stand_in_every_block_of_anthropics_messages(kind: str) -> None:
    about = {
        "text": {"text": "Hi"},
        "thinking": {"thinking": "hm"},
        "tool_use": {"id": "c", "name": "f", "input": {}},
    }
    block = {"type": kind, **about[kind], "cache_control": {"type": "ephemeral"}, **SENT_BACK}
    said = {"role": "assistant", "content": [block]}
    given = {"max_tokens": 1, "messages": [USER, said, USER]}
    assert judged(MessagesBody, given)[1] == (
        "messages[].content[].cache_control",
        "messages[].content[].provider_specific_fields",
    )


@pytest.mark.parametrize("stop", [["x"] * 17, ["x"] * 20])
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody])
def test_too_many_stop_texts_are_refused_with_the_limit(kind: type[Shape], stop: list[str]) -> None:
    given = {"messages": [USER], "prompt": "1", "input": "1"}
    body = {name: value for name, value in given.items() if name in kind.model_fields}
    with pytest.raises(FieldError, match=r"stop: .*at most 16"):
        parse(kind, {**body, "stop": stop})
    with pytest.raises(FieldError, match=r"stop\[0\]: .*valid string"):
        parse(kind, {**body, "stop": [1]})


def test_a_tiny_temperature_is_refused_with_the_range() -> None:
    with pytest.raises(FieldError, match=r"temperature: .*0, or 1e-20 to 10"):
        parse(ChatBody, chat(temperature=1e-30))


def test_a_tool_choice_without_a_name_is_refused_at_the_name() -> None:
    with pytest.raises(FieldError, match=r"tool_choice\.function: Field required"):
        parse(ChatBody, chat(tool_choice={"type": "function"}))


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_what_asks_for_nothing_is_taken(nothing: object) -> None:
    body, ignored = judged(ChatBody, chat(no_such_field=nothing, user=nothing))
    assert ignored == ()
    assert body.model_extra == {}


def test_null_is_no_limit_of_a_completion_and_elsewhere_the_default() -> None:
    body = parse(CompletionBody, {"prompt": "a", "max_tokens": None, "temperature": None})
    assert (body.max_tokens, body.temperature) == (None, 1.0)
    assert parse(CompletionBody, {"prompt": "a"}).max_tokens == 16


def test_values_that_ask_for_what_happens_anyway_are_taken_in_silence() -> None:
    for values in (CHAT.neutral, COMPLETIONS.neutral):
        fields = {
            name: allowed[0] for name, allowed in values.items() if allowed and "." not in name
        }
        assert fields
        kind: type[Shape] = ChatBody if values is CHAT.neutral else CompletionBody
        needed: dict[str, Any] = {"messages": [USER]} if kind is ChatBody else {"prompt": "1"}
        assert judged(kind, json.dumps({**needed, **fields}).encode())[1] == ()


def shapes(kind: type[BaseModel], seen: set[type[BaseModel]]) -> None:
    """Collect all models that a model's annotations lead to."""
    seen.add(kind)
    pending = [field.annotation for field in kind.model_fields.values()]
    while pending:
        one = pending.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            if one not in seen:
                shapes(one, seen)
        else:
            pending += list(getattr(one, "__args__", ()))


def test_no_shape_of_a_body_drops_what_it_does_not_know() -> None:
    seen: set[type[BaseModel]] = set()
    for operation in OPERATIONS:
        if operation.body is not None:
            shapes(operation.body, seen)
    assert len(seen) > 25
    assert [kind for kind in seen if not issubclass(kind, Shape)] == []
    assert {kind.model_config["extra"] for kind in seen} == {"allow"}


def test_a_large_body_is_judged_in_a_moment() -> None:
    part = {"type": "text", "text": "Hi"}
    body = ChatBody.model_validate_json(
        chat(messages=[{"role": "user", "content": [part, part]}] * 2700)
    )
    began = time.process_time()
    assert CHAT.judge(body) == ()
    assert time.process_time() - began < 1.0


def test_an_error_shows_names_and_values_in_part() -> None:
    with pytest.raises(InvalidInput) as raised:
        parse(ChatBody, chat(**{"x" * 5000: "y" * 5000}))
    assert len(str(raised.value)) < 300
