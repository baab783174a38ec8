"""Reasoning is the text between the markers at the start; few decodes count its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from chat_models import codec_of
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import byte_level

from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message, joined
from paceline.services.rollout_gateway.chat.parse import THINK, ChatParser
from paceline.services.rollout_gateway.chat.prompts import ChatPrompts
from paceline.services.rollout_gateway.chat.tool_formats.families import tool_format
from paceline.services.rollout_gateway.config import ChatConfig


def read(
    text: str,
    *,
    started: bool = False,
    reasoning: bool = True,
    forced: str = "",
    name: str = "none",
) -> Message:
    reader = ChatParser(
        tool_format(name, ""), reasoning=reasoning, starts_in_reasoning=started, forced=forced
    )
    return joined([reader.push(text), reader.finish()])


@pytest.mark.parametrize("name", ["none", "hermes"])
@pytest.mark.parametrize(
    ("text", "started", "reasoning", "content"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", False, "Why?", "So."),
        ("\n <think>Why?</think>So.", False, "Why?", "So."),
        ("<think>\n\n</think>\n\nSo.", False, "", "So."),
        ("<think></think>", False, "", ""),
        ("<think>a\n\nb\n\n\n</think>\n\n\n\nSo.\n", False, "a\n\nb\n\n", "\n\nSo.\n"),
        ("<think>\na < b </thin </ think>", False, "a < b </thin </ think>", ""),
        ("<think>\nand on and on\n", False, "and on and on\n", ""),
        ("<think>a</think>b</think>c<think>d</think>", False, "a", "b</think>c<think>d</think>"),
        ("<think><think>a</think>b", False, "<think>a", "b"),
        ("Why?\n</think>\n\nSo.", True, "Why?", "So."),
        ("<think>\nWhy?\n</think>\n\nSo.", True, "Why?", "So."),
        ("\n</think>\n\nSo.", True, "", "So."),
        ("Why", True, "Why", ""),
        ("", True, "", ""),
        ("So. <think>Why?</think>", False, "", "So. <think>Why?</think>"),
        ("Why?</think>So.", False, "", "Why?</think>So."),
        (" \n<thin", False, "", " \n<thin"),
        ("  So.", False, "", "  So."),
    ],
)
def test_reasoning_is_what_stands_between_the_markers_at_the_start(
    name: str, text: str, started: bool, reasoning: str, content: str
) -> None:
    assert read(text, started=started, name=name) == Message("assistant", content, reasoning)


def test_without_reasoning_the_markers_are_content() -> None:
    text = "<think>\nWhy?\n</think>\n\nSo."
    assert read(text, reasoning=False) == Message("assistant", text)
    assert read(text, reasoning=False, started=True) == Message("assistant", text)


def test_a_call_inside_reasoning_is_only_a_thought() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = read(f"<think>\n{call}\n</think>\n\n{call}", name="hermes")
    assert message.reasoning == call
    assert [found.name for found in message.tool_calls] == ["f"]
    assert message.content == ""
    assert read(f"<think>{call}", name="hermes") == Message("assistant", "", call)


def test_a_forced_call_leads_out_of_reasoning_that_the_prompt_opened() -> None:
    hermes = tool_format("hermes", "")
    assert hermes is not None
    for in_reasoning in (True, False):
        forced = "\n</think>\n\n" * in_reasoning + hermes.beginning("f")
        message = read(" {}}\n</tool_call>", started=in_reasoning, forced=forced, name="hermes")
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", "{}")]
        assert (message.content, message.reasoning) == ("", "")


PIECES = ["<think>", "</think>", "</th", "ink>", "\n", "a", "bc ", "<", "é"]


@settings(max_examples=case_count(300), deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=40), st.booleans())
def test_reasoning_tokens_are_those_up_to_the_end_of_reasoning(
    ids: list[int], started: bool
) -> None:
    decodes: list[int] = []

    def decode(some: Sequence[int]) -> str:
        decodes.append(len(some))
        return "".join(PIECES[one] for one in some)

    reader = ChatParser(None, reasoning=True, starts_in_reasoning=started)
    reader.push("".join(PIECES[one] for one in ids))
    reader.finish()
    found = reader.reasoning_tokens(ids, decode)
    assert len(decodes) <= 1 + max(len(ids), 1).bit_length()
    beginnings = ["".join(PIECES[one] for one in ids[:size]) for size in range(len(ids) + 1)]
    ends = [size for size, text in enumerate(beginnings) if "</think>" in text]
    assert found == (0 if not reader.message.reasoning else ends[0] if ends else len(ids))


def test_reasoning_that_was_counted_decodes_to_the_reasoning_that_was_read() -> None:
    text = "<think>\nab\n</think>\n\nSo."
    reader = ChatParser(None, reasoning=True)
    reader.push(text)
    count = reader.reasoning_tokens(range(len(text)), lambda ids: text[: len(ids)])
    assert text[:count] == "<think>\nab\n</think>"
    assert read(text).reasoning == "ab"


HARMONY = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{HARMONY}{FINAL}So <b>.<|return|>", "Why?", "So <b>."),
        (f"{HARMONY}{HARMONY}{FINAL}So", "Why?\nWhy?", "So"),
        (f"{HARMONY}<|channel|>commentary<|message|>I ask.<|end|>", "Why?", "I ask."),
        (f"{FINAL}So", "", "So"),
        ("<|channel|>analysis<|message|>and on and on", "and on and on", ""),
        (f"<|channel|>analysis<|message|>no end<|start|>assistant{FINAL}So", "no end", "So"),
        ("<|channel|>analysis", "", "<|channel|>analysis"),
        ("Plain.", "", "Plain."),
    ],
)
def test_channels_are_reasoning_and_content(text: str, reasoning: str, content: str) -> None:
    message = read(text, reasoning=False, name="harmony")
    assert (message.reasoning, message.content) == (reasoning, content)


def test_content_of_a_channel_comes_as_it_is_said() -> None:
    reader = ChatParser(tool_format("harmony", ""), reasoning=False)
    said = [reader.push(piece) for piece in (HARMONY[:-3], "ant", FINAL, "It ", "is <", "b> 42")]
    assert [news.reasoning for news in said] == ["Why?", "", "", "", "", ""]
    assert [news.content for news in said] == ["", "", "", "It ", "is ", "<b> 42"]


def test_tokens_of_a_channel_of_reasoning_are_counted() -> None:
    text = f"{HARMONY}{FINAL}So"
    reader = ChatParser(tool_format("harmony", ""), reasoning=False)
    reader.push(text)
    reader.finish()
    count = reader.reasoning_tokens(range(len(text)), lambda ids: text[: len(ids)])
    assert text[:count].endswith("Why?<|end|>")


def test_a_prefill_of_a_channel_stands_behind_its_header() -> None:
    chosen = tool_format("harmony", "")
    assert chosen is not None
    reader = ChatParser(chosen, reasoning=False, forced=chosen.content_beginning, prefill="It")
    reader.push(" is 42.<|return|>")
    reader.finish()
    assert reader.message.content == "It is 42."


@pytest.mark.parametrize(
    ("end", "reasoning"),
    [("<think>\n", "Why?"), ("<think></think>\n\n", ""), ("", ""), ("{# <think> #}", "")],
)
def test_the_prompt_shows_whether_the_answer_begins_inside_reasoning(
    end: str, reasoning: str
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}Answer: " + end
    codec = codec_of(byte_level([]), chat_template=template)
    prompt = ChatPrompts(ChatConfig(), codec).prompt(ChatRequest((Message("user", "Hi"),)), None)
    reader = prompt.parser()
    assert (THINK in reader.kept) == (THINK in template)
    message = joined([reader.push("Why?</think>So."), reader.finish()])
    assert message.reasoning == reasoning
