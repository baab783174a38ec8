"""Conversations with tools lose no content.

A message that a template omits is rejected by name, or shown by the default tool prompt.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from chat_models import (
    CHATML,
    HEADERS,
    MODELS,
    PLAIN,
    THINKING,
    ChatModel,
    codec_of,
    vocab_size,
)
from dialogue_engine import Desk, Saying, sampling
from session_turns import session
from tokenizer_families import byte_level

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.calls.planner import Asked
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message, ToolCall
from paceline.services.rollout_gateway.chat.parse import ChatParser
from paceline.services.rollout_gateway.chat.prompts import ChatPrompts, Known
from paceline.services.rollout_gateway.chat.tool_formats.families import TOOL_FORMATS, tool_format
from paceline.services.rollout_gateway.config import ChatConfig
from paceline.services.rollout_gateway.sessions.session import Caller

USER = Message("user", "Weather?")
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "get_time")
)
CALLS = (ToolCall("a1b2c3d4e", "get_weather", '{"city": "Bern"}'), ToolCall("b", "get_time", "{}"))
CALLED = Message("assistant", tool_calls=CALLS[:1])
RESULT = Message("tool", "rain", tool_call_id="a1b2c3d4e")
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FIRST_CALL = TURNS.replace(
    "{{ m.content }}",
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}",
)
CALLS_ALONE = TURNS.replace(
    "{{ m.content }}",
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% else %}{{ m.content }}{% endfor %}",
)
WITHOUT_RESULTS = """{% for m in messages %}
{%- if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endif %}
{%- endfor %}"""
DROPS: dict[str, tuple[str, ChatRequest, str]] = {
    "tools": (TURNS, ChatRequest((USER,), TOOLS), "tools: .*get_weather, get_time"),
    "calls": (
        TURNS,
        ChatRequest((USER, CALLED, USER)),
        "messages: .*tool calls; seen: get_weather",
    ),
    "all calls but the first": (
        FIRST_CALL,
        ChatRequest((USER, replace(CALLED, tool_calls=CALLS), RESULT)),
        "messages: .*more than one tool call.*get_weather, get_time",
    ),
    "text beside calls": (
        CALLS_ALONE,
        ChatRequest((USER, replace(CALLED, content="Let me look."), RESULT)),
        "messages: .*text beside tool calls; seen: Let me look",
    ),
    "results": (
        WITHOUT_RESULTS,
        ChatRequest((USER, CALLED, RESULT)),
        "messages: .*tool results; seen: a1b2c3d4e",
    ),
    "tools that are no last message's": (
        "{{ messages[-1].content }}{% if messages[-1].role == 'user' %}{{ tools }}{% endif %}",
        ChatRequest((USER, Message("assistant", "Where?")), TOOLS),
        "tools: a tool does not stand in the prompt.*get_weather",
    ),
}


def prompts(template: str, **settings: Any) -> ChatPrompts:
    codec = codec_of(byte_level(["<|im_start|>", "<|im_end|>"]), chat_template=template)
    return ChatPrompts(ChatConfig.model_validate(settings), codec)


def rendered(where: ChatPrompts, request: ChatRequest) -> str:
    return where._codec.decode_all(where.encode(request))


@pytest.mark.parametrize("name", DROPS)
def test_what_a_template_drops_is_refused_by_name(name: str) -> None:
    template, request, message = DROPS[name]
    where = prompts(template)
    for _ in range(2):
        with pytest.raises(InvalidInput, match=message):
            where.encode(request)
        with pytest.raises(InvalidInput, match=message):
            where.prompt(request, None)
    assert "Weather?" in rendered(where, ChatRequest((USER,)))


@pytest.mark.parametrize("template", [CHATML, HEADERS.replace("message.tool_calls | length", "1")])
def test_what_a_template_shows_is_rendered_as_it_stands(template: str) -> None:
    request = ChatRequest((USER, CALLED, RESULT), TOOLS)
    where = prompts(template)
    text = rendered(where, request)
    assert text == where._codec.template.render(request)
    assert all(part in text for part in ("get_time", "Bern", "rain"))


def test_a_template_is_probed_once() -> None:
    where, count = prompts(CHATML), 0
    template = where._codec.template
    render = template.render

    def counted(request: ChatRequest) -> str:
        nonlocal count
        count += 1
        return render(request)

    template.render = counted  # type: ignore[method-assign]
    request = ChatRequest((USER, CALLED, RESULT), TOOLS)
    where.encode(request)
    first, count = count, 0
    where.encode(request)
    assert (first > 1, count) == (True, 1)


@pytest.mark.parametrize(
    "name", [one for one in DROPS if one != "tools that are no last message's"]
)
def test_what_a_template_drops_stands_in_the_default_tool_prompt(name: str) -> None:
    template, request, _ = DROPS[name]
    text = rendered(prompts(template, tool_prompt="default", tool_format="hermes"), request)
    for tool in request.tools:
        assert json.dumps(tool["function"]) in text
    for message in request.messages:
        for call in message.tool_calls:
            assert f'"name": "{call.name}"' in text or template == WITHOUT_RESULTS
        assert message.content in text
    if request.tools:
        assert '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}' in text


@pytest.mark.parametrize("model", MODELS, ids=lambda one: one.name)
def test_text_beside_calls_stands_in_the_prompt_or_is_refused(model: ChatModel) -> None:
    where = ChatPrompts(ChatConfig(), model.codec)
    said = replace(CALLED, content="Let me look.")
    request = ChatRequest((USER, said, RESULT))
    if model.name in ("chatml", "thinking"):
        assert "Let me look." in rendered(where, request)
    else:
        kind = "tool calls" if model.name == "plain" else "text beside tool calls"
        with pytest.raises(InvalidInput, match=f"does not show {kind}"):
            where.encode(request)
    if model.name != "plain":
        empty = replace(request, messages=(USER, replace(said, content=" \n"), RESULT))
        assert "get_weather" in rendered(where, empty)


def test_text_beside_calls_of_a_known_answer_is_kept_by_its_tokens() -> None:
    where = prompts(CALLS_ALONE)
    codec = where._codec
    begun = where.prompt(ChatRequest((USER,)), None).ids
    said = codec.encode_piece("Let me look. get_weather")
    known = Known(2, (*begun, *said), said)
    request = ChatRequest((USER, replace(CALLED, content="Let me look."), RESULT))
    found = where.prompt(request, known)
    assert found.goes_on
    assert "Let me look. get_weather<|im_end|>" in codec.decode_all(found.ids)


NAMES = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "unread"),
    [(CHATML, ("name", "reasoning")), (THINKING, ("name",)), (NAMES, ("reasoning",))],
    ids=["neither", "reasoning", "names"],
)
def test_names_and_reasoning_that_no_prompt_shows_are_named(
    template: str, unread: tuple[str, ...]
) -> None:
    where = prompts(template)
    thought = Message("assistant", "Rain.", reasoning="Hm.")
    talk = (replace(USER, name="Ann"), thought, replace(USER, name="Bo"))
    assert where.prompt(ChatRequest(talk), None).unread == unread
    assert where.prompt(ChatRequest((USER,)), None).unread == ()
    tokens = where.encode(ChatRequest(talk[:1]))
    known = Known(2, tokens, ())
    assert where.prompt(ChatRequest((*talk[:2], USER)), known).unread == ()


def test_the_default_tool_prompt_needs_a_format_and_a_place_for_it() -> None:
    with pytest.raises(InvalidInput, match=r"tools: .*with a gateway\.chat\.tool_format"):
        prompts(TURNS, tool_prompt="default").encode(ChatRequest((USER,), TOOLS))
    drops_system = "{{ messages[-1].content }}"
    where = prompts(drops_system, tool_prompt="default", tool_format="hermes")
    with pytest.raises(InvalidInput, match="tools: a tool does not stand in the prompt"):
        where.encode(ChatRequest((USER,), TOOLS))


@pytest.mark.parametrize("system", [(), (Message("system", "Be brief."),)])
def test_a_dialogue_under_the_default_tool_prompt_keeps_its_tokens(
    system: tuple[Message, ...],
) -> None:
    codec = codec_of(
        byte_level(["<|im_start|>", "<|im_end|>"]),
        chat_template=TURNS + "{{ '<|im_start|>assistant\\n' }}",
        eos_token="<|im_end|>",
    )
    settings = {"tool_prompt": "default", "tool_format": "hermes"}
    desk, where = Desk(codec, vocab_size(codec), chat=settings), session()
    request = ChatRequest((*system, USER), TOOLS)
    (plan,) = desk.chat(Asked(Caller(where), sampling(), desk.name), request)
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    ids = (*codec.encode_piece(said), *codec.encode_piece("<|im_end|>"))
    message = desk.answer(plan, Saying(ids)).message
    assert message is not None
    assert [call.name for call in message.tool_calls] == ["get_weather"]
    result = replace(RESULT, tool_call_id=message.tool_calls[0].call_id)
    request = replace(request, messages=(*request.messages, message, result))
    (after,) = desk.chat(Asked(Caller(where), sampling(), desk.name), request)
    assert after.parent is where.tree.turns[0]
    assert after.prompt[: len(plan.prompt) + len(ids)] == (*plan.prompt, *ids)
    turn = "\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n"
    assert codec.decode_all(after.new_ids) == turn
    # A client with a new history gets the same text.
    assert codec.decode_all(desk.planner.prompts.encode(request)) == codec.decode_all(after.prompt)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("count", [1, 2])
def test_calls_that_a_format_writes_are_read_back(name: str, count: int) -> None:
    calls = [
        ToolCall("", "get_weather", '{"city": "Zürich", "days": 2, "at": {"h": [1, null]}}'),
        ToolCall("", "get_time", "{}"),
    ][:count]
    spelling = tool_format(name, "")
    assert spelling is not None
    reader = ChatParser(spelling.offering({one.name: {} for one in calls}), reasoning=False)
    reader.push(spelling.write_calls(calls))
    reader.finish()
    found = [(one.name, json.loads(one.arguments)) for one in reader.message.tool_calls]
    assert found == [(one.name, json.loads(one.arguments)) for one in calls]


def test_a_plain_template_without_tools_is_as_it_was() -> None:
    assert rendered(prompts(PLAIN), ChatRequest((USER,))) == "Weather?"
