"""A model message that a client sends back equals the recorded message."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.api.http.anthropic import ContentBlocks, ConversationBody
from paceline.services.rollout_gateway.api.http.requests import judged
from paceline.services.rollout_gateway.api.http.responses import OutputItems
from paceline.services.rollout_gateway.api.http.responses_schema import ResponsesBody
from paceline.services.rollout_gateway.chat.messages import (
    Delta,
    Message,
    ToolCall,
    joined,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def said(draw: st.DrawFn) -> list[Delta]:
    """A turn as the parser emits it: thought first, then content and calls in any order, cut
    anywhere.
    """
    deltas = [Delta(reasoning=text) for text in draw(st.lists(TEXT, max_size=2))]
    calls = 0
    for called in draw(st.lists(st.booleans(), max_size=5)):
        if called:
            arguments = json.dumps(
                draw(st.dictionaries(TEXT, VALUE, max_size=3)), indent=draw(st.sampled_from([0, 2]))
            )
            call = ToolCall(f"call_{calls}", draw(TEXT), arguments)
            deltas.append(Delta(tool_calls=(call,)))
            calls += 1
        else:
            deltas.append(Delta(draw(TEXT)))
    return deltas


def same(found: Message, deltas: list[Delta]) -> bool:
    return found.digest(b"") == joined(deltas).digest(b"")


@given(said())
def test_items_of_a_response_become_the_message_again(deltas: list[Delta]) -> None:
    items = OutputItems("x")
    for delta in deltas:
        items.add(delta)
    items.end("completed")
    history: list[Any] = [
        {"role": "user", "content": "a"},
        *items.items,
        {"role": "user", "content": "b"},
    ]
    body, _ = judged(ResponsesBody, json.dumps({"input": history}).encode())
    first, *turn, last = body.new_messages()
    assert (first.content, last.content) == ("a", "b")
    assert [same(message, deltas) for message in turn] == [True]


@given(said())
def test_blocks_of_a_message_become_the_message_again(deltas: list[Delta]) -> None:
    blocks = ContentBlocks()
    for delta in deltas:
        blocks.add(delta)
    blocks.end()
    history = [
        {"role": role, "content": blocks.items if role == "assistant" else "a"}
        for role in ("user", "assistant")
    ]
    body = {"messages": [*history, {"role": "user", "content": "b"}]}
    _, turn, _ = judged(ConversationBody, json.dumps(body).encode())[0].request().messages
    assert same(turn, deltas)


@given(said())
def test_events_of_a_stream_add_up_to_the_items(deltas: list[Delta]) -> None:
    items = OutputItems("x")
    events = [event for delta in deltas for event in items.add(delta)] + items.end("completed")
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == items.items
    assert [item["id"] for item in added] == [item["id"] for item in done]
    for index, item in enumerate(done):
        own = [event for event in events if event.get("output_index") == index]
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert text == whole
        assert [event["type"] for event in own][:: len(own) - 1] == [
            "response.output_item.added",
            "response.output_item.done",
        ]


def test_a_turn_ends_where_another_message_or_thought_begins() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    spoken = {"role": "assistant", "content": "x"}
    history = [spoken, spoken, thought, call, thought, spoken, call, spoken]
    found = judged(ResponsesBody, json.dumps({"input": history}).encode())[0].new_messages()
    assert [(one.reasoning, one.content, len(one.tool_calls)) for one in found] == [
        ("", "x", 0),
        ("", "x", 0),
        ("hm", "", 1),
        ("hm", "xx", 1),
    ]


def test_arguments_that_javascript_wrote_anew_are_the_same() -> None:
    def message(arguments: str) -> Message:
        return Message("assistant", tool_calls=(ToolCall("c", "f", arguments),))

    model, client = (
        '{"days": 1.0, "far": 1e2,\n "city": "Bod\\u00f8"}',
        '{"city":"Bodø","days":1,"far":100}',
    )
    assert message(model).digest(b"") == message(client).digest(b"")
    for other in ('{"city":"Bodø","days":1.5,"far":100}', '{"city":"Bodø","days":true,"far":100}'):
        assert message(model).digest(b"") != message(other).digest(b"")
