"""The vendors' own clients drive the gateway: answers, tools, streams, errors, and histories that extend the tree."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from integration.gateway.conversations import WEATHER

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}
]
FLAT_TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "The weather.", "parameters": WEATHER, "strict": False}
]
CLAUDE_TOOLS: list[Any] = [{"name": "weather", "description": "The weather.", "input_schema": WEATHER}]
OSLO = {"city": "Oslo", "days": 1.0}
FAULT = 190
"""The demo's token of the character ~."""
ASK = "What is the weather in Oslo?"


@dataclass
class Clients:
    """Both clients with one session's key."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    served: Any

    async def tree(self) -> list[dict[str, Any]]:
        """Turns of the session."""
        answer = await self.served.http.get(
            "/v1/sessions/current/export?form=tree", headers={"authorization": f"Bearer {self.openai.api_key}"}
        )
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tree"])

    async def line(self, *finishes: str) -> None:
        """The session is one line of turns that ended so, each going on from the tokens of the one before."""
        turns = await self.tree()
        assert [turn["finish_reason"] for turn in turns] == list(finishes)
        assert [turn["parent"] for turn in turns] == [None, *(turn["completion_id"] for turn in turns[:-1])]


@asynccontextmanager
async def clients(served: Any, key: str = "") -> AsyncIterator[Clients]:
    """Clients of a new session, or with `key`."""
    if not key:
        opened = await served.http.post("/v1/sessions", json={})
        key = opened.json()["api_key"]
    root = str(served.http.base_url).rstrip("/")
    async with (
        openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=key, max_retries=0, timeout=20) as one,
        anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0, timeout=20) as other,
    ):
        yield Clients(one, other, served)


async def test_openai_chat_answers_in_every_form(conversations: Any) -> None:
    async with conversations() as served, clients(served, "any") as who:
        chat = who.openai.chat.completions
        said: Any = {"model": "any", "messages": [{"role": "user", "content": "throw"}]}
        two = await chat.create(**said, n=2, seed=0, logprobs=True, top_logprobs=2)
        assert [choice.message.content for choice in two.choices] == ["heads", "tails"]
        assert two.usage is not None
        assert two.usage.completion_tokens == len("headstails") + 2
        assert two.choices[0].logprobs is not None
        (first, *_) = two.choices[0].logprobs.content or []
        assert (first.token, bytes(first.bytes or [])) == ("h", b"h")
        assert len(first.top_logprobs) == 2
        assert (await chat.create(**said, seed=1)).choices[0].message.content == "tails"
        stopped = await chat.create(**said, seed=0, stop=["ad"])
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("he", "stop")
        short = await chat.create(**said, seed=0, max_tokens=3)
        assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("hea", "length")
        async with chat.stream(**said, seed=0, stream_options={"include_usage": True}) as stream:
            text = "".join([event.delta async for event in stream if event.type == "content.delta"])
            final = await stream.get_final_completion()
        assert text == final.choices[0].message.content == "heads"
        assert final.usage is not None
        assert final.usage.completion_tokens == 6


async def test_openai_completions_and_models(conversations: Any) -> None:
    async with conversations() as served, clients(served, "any") as who:
        prompt = "[user] throw<eos>\n[assistant] "
        whole = await who.openai.completions.create(model="any", prompt=prompt, seed=0, n=2, logprobs=1)
        assert [choice.text for choice in whole.choices] == ["heads", "tails"]
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.tokens is not None
        assert "".join(whole.choices[0].logprobs.tokens[:5]) == "heads"
        parts = await who.openai.completions.create(model="any", prompt=prompt, seed=0, stream=True)
        assert "".join([part.choices[0].text async for part in parts]) == "heads"
        models = [model.id async for model in await who.openai.models.list()]
        assert models == ["tiny-model"]
        assert (await who.openai.models.retrieve("tiny-model")).object == "model"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_openai_chat_with_tools_stays_one_line_of_turns(conversations: Any, stream: bool) -> None:
    async with conversations() as served, clients(served) as who:
        messages: list[Any] = [{"role": "system", "content": "Help."}, {"role": "user", "content": ASK}]

        async def answer(**options: Any) -> Any:
            asked: Any = {"model": "any", "messages": messages, "tools": TOOLS, **options}
            if not stream:
                return (await who.openai.chat.completions.create(**asked)).choices[0]
            async with who.openai.chat.completions.stream(**asked) as events:
                return (await events.get_final_completion()).choices[0]

        first = await answer()
        assert (first.message.content, first.finish_reason) == ("Let me look.", "tool_calls")
        calls = first.message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "weather"]
        assert [json.loads(call.function.arguments) for call in calls] == [OSLO, {"city": "Bodø"}]
        messages.append(first.message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        second = await answer()
        assert (second.message.content, second.finish_reason) == ("It is wet in Oslo.", "stop")
        messages += [second.message.model_dump(exclude_none=True), {"role": "user", "content": "sure?"}]
        assert (await answer()).message.content == "Yes, I am."
        await who.line("stop", "stop", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_openai_tool_choice_makes_the_model_call(conversations: Any, choice: Any) -> None:
    async with conversations() as served, clients(served) as who:
        asked: Any = {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
        answer = await who.openai.chat.completions.create(**asked, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
        free = await who.openai.chat.completions.create(**asked, tool_choice="none")
        assert free.choices[0].message.tool_calls is None


async def responded(who: Clients, stream: bool, **asked: Any) -> Any:
    """A response, built by the client from events when it streams."""
    if not stream:
        return await who.openai.responses.create(model="any", **asked)
    async with who.openai.responses.stream(model="any", **asked) as events:
        numbers = [event.sequence_number async for event in events]
        assert numbers == list(range(len(numbers)))
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_tools_stay_one_line_of_turns(conversations: Any, stream: bool) -> None:
    async with conversations() as served, clients(served) as who:
        asked: Any = {"tools": FLAT_TOOLS, "instructions": "Help.", "store": False}
        history: list[Any] = [{"role": "user", "content": ASK}]
        first = await responded(who, stream, input=history, **asked)
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        assert first.output_text == "Let me look."
        calls = first.output[1:]
        assert [json.loads(call.arguments) for call in calls] == [OSLO, {"city": "Bodø"}]
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        second = await responded(who, stream, input=history, **asked)
        assert second.output_text == "It is wet in Oslo."
        history += second.output
        history.append({"role": "user", "content": [{"type": "input_text", "text": "sure?"}]})
        assert (await responded(who, stream, input=history, **asked)).output_text == "Yes, I am."
        await who.line("stop", "stop", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_goes_on_from_a_stored_one(conversations: Any, stream: bool) -> None:
    async with conversations() as served, clients(served) as who:
        asked: Any = {"tools": FLAT_TOOLS, "instructions": "Help."}
        first = await responded(who, stream, input=ASK, metadata={"step": "1"}, **asked)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls
        ]
        second = await responded(who, stream, input=outputs, previous_response_id=first.id, **asked)
        assert (second.output_text, second.previous_response_id) == ("It is wet in Oslo.", first.id)
        third = await responded(who, stream, input="sure?", previous_response_id=second.id, store=False, **asked)
        assert third.output_text == "Yes, I am."
        await who.line("stop", "stop", "stop")

        kept = await who.openai.responses.retrieve(first.id)
        assert [item.id for item in kept.output] == [item.id for item in first.output]
        assert kept.output_text == first.output_text
        assert (kept.metadata, kept.status, kept.model) == ({"step": "1"}, "completed", "tiny-model")
        with pytest.raises(openai.NotFoundError):
            await who.openai.responses.retrieve(third.id)
        await who.openai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            await who.openai.responses.create(model="any", input="x", previous_response_id=first.id)
        assert (unknown.value.param, unknown.value.code) == ("previous_response_id", "response_not_found")
        async with clients(served) as stranger:
            with pytest.raises(openai.NotFoundError):
                await stranger.openai.responses.retrieve(second.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_tell_reasoning_limits_and_usage(conversations: Any, stream: bool) -> None:
    async with conversations() as served, clients(served) as who:
        history: list[Any] = [{"role": "user", "content": "think about it"}]
        thought = await responded(who, stream, input=history)
        reasoning, message = thought.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Two and two.")
        assert (message.type, message.content[0].text, message.status) == ("message", "Four.", "completed")
        assert thought.usage.output_tokens_details.reasoning_tokens == len("<think>\nTwo and two.\n</think>")
        assert thought.usage.total_tokens == thought.usage.input_tokens + thought.usage.output_tokens
        history += [item.model_dump(exclude_none=True) for item in thought.output]
        sure = await responded(who, stream, input=[*history, {"role": "user", "content": "sure?"}])
        assert sure.output_text == "Yes, I am."
        await who.line("stop", "stop")

        short: Any = {"model": "any", "input": "count", "max_output_tokens": 3}
        if stream:
            events = [event async for event in await who.openai.responses.create(**short, stream=True)]
            assert events[-1].type == "response.incomplete"
            cut = events[-1].response
        else:
            cut = await who.openai.responses.create(**short)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (cut.output_text, cut.output[0].status) == ("one", "incomplete")
        assert (await responded(who, stream, input="nothing")).output[0].content[0].text == ""


async def test_events_of_a_response_come_in_the_documented_order(conversations: Any) -> None:
    async with conversations() as served, clients(served) as who:
        stream = await who.openai.responses.create(model="any", input=ASK, tools=FLAT_TOOLS, stream=True)
        events = [event async for event in stream]
        names = [event.type.removeprefix("response.") for event in events]
        deltas = [name for name in names if name.endswith("output_text.delta")]
        text = ["content_part.added", *deltas, "output_text.done", "content_part.done"]
        call = ["function_call_arguments.delta", "function_call_arguments.done"]
        item = ["output_item.added", "output_item.done"]
        whole = [item[0], *text, item[1], *(name for _ in range(2) for name in (item[0], *call, item[1]))]
        assert names == ["created", "in_progress", *whole, "completed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def messaged(who: Clients, stream: bool, **asked: Any) -> Any:
    """A message of Anthropic's API, built by the client from events when it streams."""
    asked = {"model": "any", "max_tokens": 200, **asked}
    if not stream:
        return await who.anthropic.messages.create(**asked)
    async with who.anthropic.messages.stream(**asked) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_anthropic_conversation_with_tools_stays_one_line_of_turns(conversations: Any, stream: bool) -> None:
    async with conversations() as served, clients(served) as who:
        asked: Any = {"tools": CLAUDE_TOOLS, "system": [{"type": "text", "text": "Help."}]}
        history: list[Any] = [{"role": "user", "content": ASK}]
        first = await messaged(who, stream, messages=history, **asked)
        assert first.stop_reason == "tool_use"
        text, *uses = first.content
        assert (text.text, [use.input for use in uses]) == ("Let me look.", [OSLO, {"city": "Bodø"}])
        content = [
            {"type": "tool_result", "tool_use_id": uses[0].id, "content": [{"type": "text", "text": "rain"}]},
            {"type": "tool_result", "tool_use_id": uses[1].id, "content": "no such city", "is_error": True},
        ]
        history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": content}]
        second = await messaged(who, stream, messages=history, **asked)
        assert (second.content[0].text, second.stop_reason) == ("It is wet in Oslo.", "end_turn")
        history += [{"role": "assistant", "content": second.content[0].text}, {"role": "user", "content": "sure?"}]
        assert (await messaged(who, stream, messages=history, **asked)).content[0].text == "Yes, I am."
        await who.line("stop", "stop", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_tells_thinking_limits_stops_and_usage(conversations: Any, stream: bool) -> None:
    async with conversations() as served, clients(served) as who:
        history: list[Any] = [{"role": "user", "content": "think about it"}]
        thought = await messaged(who, stream, messages=history)
        assert [block.type for block in thought.content] == ["thinking", "text"]
        assert (thought.content[0].thinking, thought.content[1].text) == ("Two and two.", "Four.")
        history += [{"role": "assistant", "content": thought.content}, {"role": "user", "content": "sure?"}]
        counted = await who.anthropic.messages.count_tokens(model="any", messages=history)
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
        assert (await messaged(who, stream, messages=[{"role": "user", "content": "nothing"}])).content == []


@pytest.mark.parametrize("joined", [True, False])
async def test_an_anthropic_prefill_is_continued_and_recorded(conversations: Any, joined: bool) -> None:
    async with conversations() as served, clients(served) as who:
        history: list[Any] = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]
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
async def test_anthropic_tool_choice_makes_the_model_call(conversations: Any, choice: Any) -> None:
    async with conversations() as served, clients(served) as who:
        asked: Any = {"messages": [{"role": "user", "content": "Hi"}], "tools": CLAUDE_TOOLS}
        (use,) = (await messaged(who, False, **asked, tool_choice=choice)).content
        assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Bern"})
        free = await messaged(who, True, **asked, tool_choice={"type": "none"})
        assert free.content[0].type == "text"


async def test_a_conversation_may_change_its_api_and_stay_one_line(conversations: Any) -> None:
    async with conversations() as served, clients(served) as who:
        asked: Any = {"input": ASK, "tools": FLAT_TOOLS, "instructions": "Help."}
        first = await who.openai.responses.create(model="any", **asked)
        calls: list[Any] = [item for item in first.output if item.type == "function_call"]
        uses = [
            {"type": "tool_use", "id": one.call_id, "name": one.name, "input": json.loads(one.arguments)}
            for one in calls
        ]
        results = [{"type": "tool_result", "tool_use_id": one.call_id, "content": "rain"} for one in calls]
        history: list[Any] = [
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": [{"type": "text", "text": first.output_text}, *uses]},
            {"role": "user", "content": results},
        ]
        second = await messaged(who, False, messages=history, tools=CLAUDE_TOOLS, system="Help.")
        assert second.content[0].text == "It is wet in Oslo."
        await who.line("stop", "stop")


async def test_a_reward_may_name_a_response_or_a_message(conversations: Any) -> None:
    async with conversations() as served, clients(served) as who:
        response = await who.openai.responses.create(model="any", input="Hi")
        message = await messaged(who, False, messages=[{"role": "user", "content": "Hi"}])
        headers = {"authorization": f"Bearer {who.openai.api_key}"}
        for index, name in enumerate((response.id, message.id)):
            body = {"completion_id": name, "value": float(index)}
            assert (await served.http.post("/v1/rewards", json=body, headers=headers)).status_code == 200
        assert [turn["reward"] for turn in await who.tree()] == [0.0, 1.0]


async def test_a_stream_that_fails_before_its_first_token_fails_by_status(conversations: Any, script: dict[str, Any]) -> None:
    script["fault_token"] = FAULT
    async with conversations() as served, clients(served) as who:
        broken = "~"
        with pytest.raises(openai.InternalServerError):
            await who.openai.responses.create(model="any", input=broken, stream=True)
        with pytest.raises(openai.InternalServerError):
            await who.openai.chat.completions.create(
                model="any", messages=[{"role": "user", "content": broken}], stream=True
            )
        for stream in (True, False):
            with pytest.raises(anthropic.InternalServerError) as failed:
                await messaged(who, stream, messages=[{"role": "user", "content": broken}])
            assert failed.value.type == "api_error"
        assert (await messaged(who, False, messages=[{"role": "user", "content": "Hi"}])).stop_reason == "end_turn"
        assert len(await who.tree()) == 1


async def test_errors_become_the_clients_own(conversations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    async with conversations(queue={"running": 1, "limit": 1, "wait_s": 0.01}) as served:
        async with clients(served, "wrong") as who:
            hello: Any = [{"role": "user", "content": "Hi"}]
            with pytest.raises(openai.AuthenticationError):
                await who.openai.chat.completions.create(model="any", messages=hello)
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await who.anthropic.messages.create(model="any", messages=hello, max_tokens=5)
            assert refused.value.type == "authentication_error"
        async with clients(served, "secret") as who:
            with pytest.raises(openai.BadRequestError) as wrong:
                await who.openai.chat.completions.create(model="any", messages=hello, temperature=11)
            assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
            with pytest.raises(openai.NotFoundError):
                await who.openai.models.retrieve("other")
            with pytest.raises(anthropic.BadRequestError):
                await who.anthropic.messages.create(model="any", messages=hello, max_tokens=0)
        opened = await served.http.post("/v1/sessions", json={}, headers={"authorization": "Bearer secret"})
        async with clients(served, opened.json()["api_key"]) as who:
            await who.openai.chat.completions.create(model="any", messages=hello)
            with pytest.raises(openai.RateLimitError):
                await who.openai.chat.completions.create(model="any", messages=hello)
            with pytest.raises(anthropic.RateLimitError):
                await who.anthropic.messages.create(model="any", messages=hello, max_tokens=5)
            with pytest.raises(anthropic.RateLimitError):
                await messaged(who, True, messages=hello)
