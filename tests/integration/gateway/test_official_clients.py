"""OpenAI's own client drives the gateway: answers, tools, streams, and histories that extend the
tree.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from integration.gateway.official_clients import ASK, FLAT_TOOLS, OSLO, TOOLS, clients, responded

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_openai_chat_answers_in_every_form(served: Any) -> None:
    async with clients(served, "any") as who:
        chat = who.openai.chat.completions
        said: Any = {"model": "tiny-model", "messages": [{"role": "user", "content": "throw"}]}
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
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
            "he",
            "stop",
        )
        short = await chat.create(**said, seed=0, max_tokens=3)
        assert (short.choices[0].message.content, short.choices[0].finish_reason) == (
            "hea",
            "length",
        )
        async with chat.stream(**said, seed=0, stream_options={"include_usage": True}) as stream:
            text = "".join([event.delta async for event in stream if event.type == "content.delta"])
            final = await stream.get_final_completion()
        assert text == final.choices[0].message.content == "heads"
        assert final.usage is not None
        assert final.usage.completion_tokens == 6


async def test_openai_completions_and_models(served: Any) -> None:
    async with clients(served, "any") as who:
        prompt = "[user] throw<eos>\n[assistant] "
        whole = await who.openai.completions.create(
            model="tiny-model", prompt=prompt, seed=0, n=2, logprobs=1
        )
        assert [choice.text for choice in whole.choices] == ["heads", "tails"]
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.tokens is not None
        assert "".join(whole.choices[0].logprobs.tokens[:5]) == "heads"
        parts = await who.openai.completions.create(
            model="tiny-model", prompt=prompt, seed=0, stream=True
        )
        assert "".join([part.choices[0].text async for part in parts]) == "heads"
        models = [model.id async for model in await who.openai.models.list()]
        assert models == ["tiny-model"]
        assert (await who.openai.models.retrieve("tiny-model")).object == "model"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_openai_chat_with_tools_stays_one_line_of_turns(served: Any, stream: bool) -> None:
    async with clients(served) as who:
        messages: list[Any] = [
            {"role": "system", "content": "Help."},
            {"role": "user", "content": ASK},
        ]

        async def answer(**options: Any) -> Any:
            asked: Any = {"model": "tiny-model", "messages": messages, "tools": TOOLS, **options}
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
        messages += [
            second.message.model_dump(exclude_none=True),
            {"role": "user", "content": "sure?"},
        ]
        assert (await answer()).message.content == "Yes, I am."
        await who.line("stop", "stop", "stop")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_openai_tool_choice_makes_the_model_call(served: Any, choice: Any) -> None:
    async with clients(served) as who:
        asked: Any = {
            "model": "tiny-model",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": TOOLS,
        }
        answer = await who.openai.chat.completions.create(**asked, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather",
            {"city": "Bern"},
        )
        free = await who.openai.chat.completions.create(**asked, tool_choice="none")
        assert free.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_tools_stay_one_line_of_turns(served: Any, stream: bool) -> None:
    async with clients(served) as who:
        asked: Any = {"tools": FLAT_TOOLS, "instructions": "Help.", "store": False}
        history: list[Any] = [{"role": "user", "content": ASK}]
        first = await responded(who, stream, input=history, **asked)
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        assert first.output_text == "Let me look."
        calls = first.output[1:]
        assert [json.loads(call.arguments) for call in calls] == [OSLO, {"city": "Bodø"}]
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            for call in calls
        ]
        second = await responded(who, stream, input=history, **asked)
        assert second.output_text == "It is wet in Oslo."
        history += second.output
        history.append({"role": "user", "content": [{"type": "input_text", "text": "sure?"}]})
        assert (await responded(who, stream, input=history, **asked)).output_text == "Yes, I am."
        await who.line("stop", "stop", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_goes_on_from_a_stored_one(served: Any, stream: bool) -> None:
    async with clients(served) as who:
        asked: Any = {"tools": FLAT_TOOLS, "instructions": "Help."}
        first = await responded(who, stream, input=ASK, metadata={"step": "1"}, **asked)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
            for call in calls
        ]
        second = await responded(who, stream, input=outputs, previous_response_id=first.id, **asked)
        assert (second.output_text, second.previous_response_id) == ("It is wet in Oslo.", first.id)
        third = await responded(
            who, stream, input="sure?", previous_response_id=second.id, store=False, **asked
        )
        assert third.output_text == "Yes, I am."
        await who.line("stop", "stop", "stop")

        kept = await who.openai.responses.retrieve(first.id)
        assert [item.id for item in kept.output] == [item.id for item in first.output]
        assert kept.output_text == first.output_text
        assert (kept.metadata, kept.status, kept.model) == (
            {"step": "1"},
            "completed",
            "tiny-model",
        )
        with pytest.raises(openai.NotFoundError):
            await who.openai.responses.retrieve(third.id)
        await who.openai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            await who.openai.responses.create(
                model="tiny-model", input="x", previous_response_id=first.id
            )
        assert (unknown.value.param, unknown.value.code) == (
            "previous_response_id",
            "response_not_found",
        )
        async with clients(served) as stranger:
            with pytest.raises(openai.NotFoundError):
                await stranger.openai.responses.retrieve(second.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_tell_reasoning_limits_and_usage(served: Any, stream: bool) -> None:
    async with clients(served) as who:
        history: list[Any] = [{"role": "user", "content": "think about it"}]
        thought = await responded(who, stream, input=history)
        reasoning, message = thought.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Two and two.")
        assert (message.type, message.content[0].text, message.status) == (
            "message",
            "Four.",
            "completed",
        )
        assert thought.usage.output_tokens_details.reasoning_tokens == len(
            "<think>\nTwo and two.\n</think>"
        )
        assert (
            thought.usage.total_tokens == thought.usage.input_tokens + thought.usage.output_tokens
        )
        history += [item.model_dump(exclude_none=True) for item in thought.output]
        sure = await responded(who, stream, input=[*history, {"role": "user", "content": "sure?"}])
        assert sure.output_text == "Yes, I am."
        await who.line("stop", "stop")

        short: Any = {"model": "tiny-model", "input": "count", "max_output_tokens": 3}
        if stream:
            events = [
                event async for event in await who.openai.responses.create(**short, stream=True)
            ]
            assert events[-1].type == "response.incomplete"
            cut = events[-1].response
        else:
            cut = await who.openai.responses.create(**short)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (cut.output_text, cut.output[0].status) == ("one", "incomplete")
        assert (await responded(who, stream, input="nothing")).output[0].content[0].text == ""


async def test_events_of_a_response_come_in_the_documented_order(served: Any) -> None:
    async with clients(served) as who:
        stream = await who.openai.responses.create(
            model="tiny-model", input=ASK, tools=FLAT_TOOLS, stream=True
        )
        events = [event async for event in stream]
        names = [event.type.removeprefix("response.") for event in events]
        deltas = [name for name in names if name.endswith("output_text.delta")]
        text = ["content_part.added", *deltas, "output_text.done", "content_part.done"]
        call = ["function_call_arguments.delta", "function_call_arguments.done"]
        item = ["output_item.added", "output_item.done"]
        whole = [
            item[0],
            *text,
            item[1],
            *(name for _ in range(2) for name in (item[0], *call, item[1])),
        ]
        assert names == ["created", "in_progress", *whole, "completed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
