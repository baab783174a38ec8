"""Conversations with tools lose no content.

A message that a template omits is rejected by name.
"""

from __future__ import annotations

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
)
from tokenizer_families import byte_level

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message, ToolCall
from paceline.services.rollout_gateway.chat.prompts import ChatPrompts, Known
from paceline.services.rollout_gateway.config import ChatConfig

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


def test_a_plain_template_without_tools_is_as_it_was() -> None:
    assert rendered(prompts(PLAIN), ChatRequest((USER,))) == "Weather?"
