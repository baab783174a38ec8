"""Streamed chat answers over real connections: joined, broken off, refused, stalled, left early."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.client.scripted_gateway import ScriptedGateway, close, close_within, events, refuse, reply

from paceline.client.server_events import MAX_EVENT_BYTES, EventReader
from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    ResourceExhausted,
    Unavailable,
)
from paceline.local.patience import patient

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
HELLO = [{"role": "user", "content": "hello"}]


def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, **more}


async def gather(stream: Any, said: list[str]) -> None:
    async for delta in stream:
        said.append(str(delta))


def call(index: int, arguments: str, **named: str) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": named["name"]} if named else {})
    return {"index": index, "type": "function", "function": function} | (
        {"id": named["id"]} if named else {}
    )


async def test_deltas_join_to_the_message_that_a_whole_answer_would_hold(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    gateway.then(
        events(
            chunk({"role": "assistant", "reasoning_content": "hm"}),
            chunk({"content": "line\u2028two"}),
            chunk(
                {
                    "tool_calls": [
                        call(0, '{"a"', id="c1", name="add"),
                        call(1, "{}", id="c2", name="now"),
                    ]
                }
            ),
            chunk({"tool_calls": [call(0, ": 1}")]}),
            chunk({"content": "\x85"}, "tool_calls"),
            chunk(
                None,
                usage={
                    "prompt_tokens": 9,
                    "completion_tokens": 4,
                    "prompt_tokens_details": {"cached_tokens": 8},
                },
            ),
        )
    )
    stream = session.chat_stream(HELLO, tools=[])
    deltas = [delta async for delta in stream]
    assert "".join(map(str, deltas)) == "line\u2028two\x85"
    assert {delta.completion_id for delta in deltas} == {"chatcmpl-1"}
    answer = stream.answer()
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert answer.message == {
        "role": "assistant",
        "content": "line\u2028two\x85",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": function},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert [one.parsed() for one in answer.tool_calls] == [{"a": 1}, {}]
    assert (answer.completion_id, answer.finish_reason, answer.reasoning) == (
        "chatcmpl-1",
        "tool_calls",
        "hm",
    )
    assert (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.cached_tokens,
    ) == (9, 4, 8)
    asked = gateway.seen[-1].body
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})


async def test_a_stream_is_asked_for_again_only_before_it_begins(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    busy = refuse(503, "no worker serves", "unavailable")
    full = refuse(429, "full", "resource_exhausted", "rate_limit_error", retry_after="0")
    gateway.then(busy, full, events(chunk({"content": "a"}, "stop")))
    assert [str(delta) async for delta in session.chat_stream(HELLO)] == ["a"]
    assert len(gateway.seen) == 4
    head = b'data: {"id": "c", "choices": []}\n\n'
    for step, reason in (
        (close, "CONNECTION_LOST"),
        (close_within(head), "STREAM_BROKEN"),
        (events(chunk({"content": "a"}), done=False), "STREAM_BROKEN"),
    ):
        asked = len(gateway.seen)
        gateway.then(step)
        stream = session.chat_stream(HELLO)
        with pytest.raises(Unavailable) as caught:
            _ = [delta async for delta in stream]
        assert caught.value.reason == reason
        assert len(gateway.seen) == asked + 1
        with pytest.raises(FailedPrecondition, match="has not ended"):
            stream.answer()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (
            events(
                {
                    "error": {
                        "message": "the engine failed",
                        "type": "server_error",
                        "code": "internal",
                    }
                }
            ),
            InternalError,
        ),
        (
            events({"error": {"message": "late", "type": "rate_limit_error", "code": "queue"}}),
            ResourceExhausted,
        ),
        (events({"error": "?"}), InternalError),
        (events([1]), DataLoss),
        (events({"id": "c"}), DataLoss),
        (reply(200, b"data: {\n\n"), DataLoss),
        (refuse(409, "ended", "session_ended"), FailedPrecondition),
    ],
)
async def test_errors_of_a_stream(
    gateway: ScriptedGateway, client: Any, step: Any, error: type[Exception]
) -> None:
    session = await client.session()
    gateway.then(step)
    with pytest.raises(error):
        _ = [delta async for delta in session.chat_stream(HELLO)]
    assert len(gateway.seen) == 2


async def test_a_stream_that_stalls_ends_at_its_deadline(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    said: list[str] = []
    for deadline_s in (0.4, 4.0, 40.0):  # a busy machine may need longer for what comes before
        gateway.then(
            gateway.hang(b'data: {"id": "c", "choices": [{"delta": {"content": "a"}}]}\n\n')
        )
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await gather(session.chat_stream(HELLO, deadline_s=deadline_s), said)
        assert deadline_s <= time.monotonic() - began < deadline_s + patient(20)
        if said:
            break
    assert said == ["a"]


async def test_leaving_a_stream_early_hangs_up(gateway: ScriptedGateway, client: Any) -> None:
    session = await client.session()
    gateway.then(gateway.hang(b'data: {"id": "c", "choices": [{"delta": {"content": "a"}}]}\n\n'))
    stream = session.chat_stream(HELLO)
    async for delta in stream:
        assert str(delta) == "a"
        break
    await stream.close()
    assert gateway.gone.wait(patient(10))
    assert (await session.info()).id == "s1"


@settings(max_examples=40)
@given(
    texts=st.lists(st.text(), max_size=5),
    ends=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_events_are_the_same_wherever_the_bytes_are_cut(
    texts: list[str], ends: bytes, cuts: list[int]
) -> None:
    lines: list[bytes] = [b": a comment", b""]
    for text in texts:
        said = json.dumps(text, ensure_ascii=False).encode()
        lines += [b"event: x", b'data: {"text":', b"data: " + said + b"}", b""]
    whole = ends.join([*lines, b"data:[DONE]", b"", b"data: after the end", b"", b""])
    for places in (
        [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)],
        range(len(whole) + 1),
    ):
        reader = EventReader()
        found = [
            one["text"] for begin, end in pairwise(places) for one in reader.feed(whole[begin:end])
        ]
        assert found == texts
        assert reader.done


def test_an_endless_event_is_refused_before_it_fills_the_memory() -> None:
    reader = EventReader()
    list(reader.feed(b"data: x\n"))
    list(reader.feed(b"data: " + b"x" * (MAX_EVENT_BYTES - 7)))
    with pytest.raises(DataLoss, match="too long"):
        list(reader.feed(b"x"))
