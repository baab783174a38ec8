"""Anthropic's own client drives the gateway, alone and beside OpenAI's: answers, tools, streams,
histories, errors.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from integration.gateway.official_clients import (
    ASK,
    CLAUDE_TOOLS,
    FLAT_TOOLS,
    OSLO,
    clients,
    messaged,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAULT = 190
"""The demo's token for the character ~."""


@pytest.mark.parametrize("stream", [False, True])
async def test_an_anthropic_conversation_with_tools_stays_one_line_of_turns(
    served: Any, stream: bool
) -> None:
    async with clients(served) as who:
        asked: Any = {"tools": CLAUDE_TOOLS, "system": [{"type": "text", "text": "Help."}]}
        history: list[Any] = [{"role": "user", "content": ASK}]
        first = await messaged(who, stream, messages=history, **asked)
        assert first.stop_reason == "tool_use"
        text, *uses = first.content
        assert (text.text, [use.input for use in uses]) == (
            "Let me look.",
            [OSLO, {"city": "Bodø"}],
        )
        content = [
            {
                "type": "tool_result",
                "tool_use_id": uses[0].id,
                "content": [{"type": "text", "text": "rain"}],
            },
            {
                "type": "tool_result",
                "tool_use_id": uses[1].id,
                "content": "no such city",
                "is_error": True,
            },
        ]
        history += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": content},
        ]
        second = await messaged(who, stream, messages=history, **asked)
        assert (second.content[0].text, second.stop_reason) == ("It is wet in Oslo.", "end_turn")
        history += [
            {"role": "assistant", "content": second.content[0].text},
            {"role": "user", "content": "sure?"},
        ]
        assert (await messaged(who, stream, messages=history, **asked)).content[
            0
        ].text == "Yes, I am."
        await who.line("stop", "stop", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_tells_thinking_limits_stops_and_usage(served: Any, stream: bool) -> None:
    async with clients(served) as who:
        history: list[Any] = [{"role": "user", "content": "think about it"}]
        thought = await messaged(who, stream, messages=history)
        assert [block.type for block in thought.content] == ["thinking", "text"]
        assert (thought.content[0].thinking, thought.content[1].text) == ("Two and two.", "Four.")
        history += [
            {"role": "assistant", "content": thought.content},
            {"role": "user", "content": "sure?"},
        ]
        counted = await who.anthropic.messages.count_tokens(model="tiny-model", messages=history)
        sure = await messaged(who, stream, messages=history)
        assert sure.content[0].text == "Yes, I am."
        assert sure.usage.input_tokens + sure.usage.cache_read_input_tokens == counted.input_tokens
        assert sure.usage.output_tokens == len("Yes, I am.") + 1
        await who.line("stop", "stop")

        count: Any = {"messages": [{"role": "user", "content": "count"}]}
        cut = await messaged(who, stream, **count, max_tokens=3)
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "one")
        stopped = await messaged(who, stream, **count, stop_sequences=["x", " thr"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " thr")
        assert stopped.content[0].text == "one two"
        assert (
            await messaged(who, stream, messages=[{"role": "user", "content": "nothing"}])
        ).content == []


@pytest.mark.parametrize("joined", [True, False])
async def test_an_anthropic_prefill_is_continued_and_recorded(served: Any, joined: bool) -> None:
    async with clients(served) as who:
        history: list[Any] = [
            {"role": "user", "content": "count"},
            {"role": "assistant", "content": "one two"},
        ]
        went_on = await messaged(who, False, messages=history)
        assert went_on.content[0].text == " and three"
        if joined:
            history[-1] = {"role": "assistant", "content": "one two and three"}
        else:
            history.append({"role": "assistant", "content": went_on.content})
        sure = await messaged(who, False, messages=[*history, {"role": "user", "content": "sure?"}])
        assert sure.content[0].text == "Yes, I am."
        await who.line("stop", "stop")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_anthropic_tool_choice_makes_the_model_call(served: Any, choice: Any) -> None:
    async with clients(served) as who:
        asked: Any = {"messages": [{"role": "user", "content": "Hi"}], "tools": CLAUDE_TOOLS}
        (use,) = (await messaged(who, False, **asked, tool_choice=choice)).content
        assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Bern"})
        free = await messaged(who, True, **asked, tool_choice={"type": "none"})
        assert free.content[0].type == "text"


async def test_a_conversation_may_change_its_api_and_stay_one_line(served: Any) -> None:
    async with clients(served) as who:
        asked: Any = {"input": ASK, "tools": FLAT_TOOLS, "instructions": "Help."}
        first = await who.openai.responses.create(model="tiny-model", **asked)
        calls: list[Any] = [item for item in first.output if item.type == "function_call"]
        uses = [
            {
                "type": "tool_use",
                "id": one.call_id,
                "name": one.name,
                "input": json.loads(one.arguments),
            }
            for one in calls
        ]
        results = [
            {"type": "tool_result", "tool_use_id": one.call_id, "content": "rain"} for one in calls
        ]
        history: list[Any] = [
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": [{"type": "text", "text": first.output_text}, *uses]},
            {"role": "user", "content": results},
        ]
        second = await messaged(who, False, messages=history, tools=CLAUDE_TOOLS, system="Help.")
        assert second.content[0].text == "It is wet in Oslo."
        await who.line("stop", "stop")


async def test_a_reward_may_name_a_response_or_a_message(served: Any) -> None:
    async with clients(served) as who:
        response = await who.openai.responses.create(model="tiny-model", input="Hi")
        message = await messaged(who, False, messages=[{"role": "user", "content": "Hi"}])
        headers = {"authorization": f"Bearer {who.openai.api_key}"}
        for index, name in enumerate((response.id, message.id)):
            body = {"completion_id": name, "value": float(index)}
            assert (
                await served.http.post("/v1/rewards", json=body, headers=headers)
            ).status_code == 200
        assert [turn["reward"] for turn in await who.tree()] == [0.0, 1.0]


async def test_a_stream_that_fails_before_its_first_token_fails_by_status(
    conversations: Any, script: dict[str, Any]
) -> None:
    script["fault_token"] = FAULT
    async with conversations() as served, clients(served) as who:
        broken = "~"
        with pytest.raises(openai.InternalServerError):
            await who.openai.responses.create(model="tiny-model", input=broken, stream=True)
        with pytest.raises(openai.InternalServerError):
            await who.openai.chat.completions.create(
                model="tiny-model", messages=[{"role": "user", "content": broken}], stream=True
            )
        for stream in (True, False):
            with pytest.raises(anthropic.InternalServerError) as failed:
                await messaged(who, stream, messages=[{"role": "user", "content": broken}])
            assert failed.value.type == "api_error"
        assert (
            await messaged(who, False, messages=[{"role": "user", "content": "Hi"}])
        ).stop_reason == "end_turn"
        assert len(await who.tree()) == 1


async def test_errors_become_the_clients_own(
    conversations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    async with conversations(sessions={"max_turns": 1, "max_parallel": 1}) as served:
        async with clients(served, "wrong") as who:
            hello: Any = [{"role": "user", "content": "Hi"}]
            with pytest.raises(openai.AuthenticationError):
                await who.openai.chat.completions.create(model="tiny-model", messages=hello)
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await who.anthropic.messages.create(
                    model="tiny-model", messages=hello, max_tokens=5
                )
            assert refused.value.type == "authentication_error"
        async with clients(served, "secret") as who:
            with pytest.raises(openai.BadRequestError) as wrong:
                await who.openai.chat.completions.create(
                    model="tiny-model", messages=hello, temperature=11
                )
            assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
            with pytest.raises(openai.NotFoundError):
                await who.openai.models.retrieve("other")
            with pytest.raises(anthropic.BadRequestError):
                await who.anthropic.messages.create(
                    model="tiny-model", messages=hello, max_tokens=0
                )
        opened = await served.http.post(
            "/v1/sessions", json={}, headers={"authorization": "Bearer secret"}
        )
        async with clients(served, opened.json()["api_key"]) as who:
            with pytest.raises(openai.RateLimitError):
                await who.openai.chat.completions.create(model="tiny-model", messages=hello, n=2)
            await who.openai.chat.completions.create(model="tiny-model", messages=hello)
            with pytest.raises(openai.ConflictError):
                await who.openai.chat.completions.create(model="tiny-model", messages=hello)
            with pytest.raises(anthropic.ConflictError):
                await who.anthropic.messages.create(
                    model="tiny-model", messages=hello, max_tokens=5
                )
            with pytest.raises(anthropic.ConflictError):
                await messaged(who, True, messages=hello)


async def test_events_of_a_message_come_in_the_documented_order(served: Any) -> None:
    body = {
        "max_tokens": 200,
        "stream": True,
        "tools": CLAUDE_TOOLS,
        "messages": [{"role": "user", "content": ASK}],
    }
    raw = (await served.http.post("/v1/messages", json=body)).text
    frames = [frame.split("\n") for frame in raw.strip().split("\n\n")]
    names = [lines[0].removeprefix("event: ") for lines in frames]
    events = [json.loads(lines[1].removeprefix("data: ")) for lines in frames]
    assert [event["type"] for event in events] == names
    deltas = names.count("content_block_delta") - 2  # each call's arguments are one
    text, call = (
        ["content_block_start", *["content_block_delta"] * n, "content_block_stop"]
        for n in (deltas, 1)
    )
    assert names == [
        "message_start",
        "ping",
        *text,
        *call,
        *call,
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("limit", [{"max_tokens": 3}, {"stop_sequences": [" thr"]}])
async def test_an_answer_that_was_cut_is_gone_on_from(served: Any, limit: dict[str, Any]) -> None:
    async with clients(served) as who:
        history: list[Any] = [{"role": "user", "content": "count"}]
        cut = await messaged(who, False, messages=history, **limit)
        history += [
            {"role": "assistant", "content": cut.content},
            {"role": "user", "content": "sure?"},
        ]
        sure = await messaged(who, True, messages=history)
        assert sure.content[0].text == "Yes, I am."
        first, second = await who.tree()
        assert second["parent"] == first["completion_id"]
