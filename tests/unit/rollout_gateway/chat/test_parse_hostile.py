"""Hostile responses cost time in proportion to their length and never raise."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import pytest

from paceline.services.rollout_gateway.chat.messages import Message, joined
from paceline.services.rollout_gateway.chat.parse import ChatParser
from paceline.services.rollout_gateway.chat.tool_formats.base import GrowingText
from paceline.services.rollout_gateway.chat.tool_formats.families import TOOL_FORMATS, tool_format

FORMATS = list(TOOL_FORMATS)
LONGEST = max(len(text) for make in TOOL_FORMATS.values() for text in make("").special_tokens)
CALL = '{"name": "f", "arguments": '

ENDLESS = {  # a beginning, and the text repeated after it
    "angle brackets": ("", "<"),
    "square brackets": ("", "["),
    "braces": ("", "{"),
    "white space": ("", " \n"),
    "white space and brackets": ("", "  <"),
    "words": ("", "word "),
    "openings": ("", "<tool_call>"),
    "openings of objects": ("", '<tool_call>{"'),
    "openings in a string": ('<tool_call>{"name": "', "<tool_call>{"),
    "openings in an array": ('<tool_call>{"a": [', '"<tool_call>{", '),
    "marks": ("", "[TOOL_CALLS]["),
    "named marks": ("", "[TOOL_CALLS]a[ARGS]{"),
    "tags": ("", "<|python_tag|>{"),
    "broken calls": ("", "<tool_call>{}</tool_call>"),
    "calls": ("", f"<tool_call>{CALL}{{}}}}</tool_call>"),
    "marked calls": ("", "[TOOL_CALLS]f[ARGS]{}"),
    "calls with semicolons": ("", f"{CALL}{{}}}};"),
    "a name": ("[TOOL_CALLS]", "a"),
    "escapes": (f'<tool_call>{CALL}"', "\\\\"),
    "a long string": (f'<tool_call>{CALL}"', "x"),
    "members": (f"<tool_call>{CALL}{{", '"a": 1, '),
    "a number": (f"<tool_call>{CALL}", "1"),
    "a call's end that does not come": (f"<tool_call>{CALL}{{}}}}", "  "),
    "nested arrays": (f"<tool_call>{CALL}", "["),
    "functions in tags": ("", "<tool_call><function=f>"),
    "parameters": ("<tool_call><function=f>", "<parameter=a>1</parameter>"),
    "a value's end that does not come": ("<tool_call><function=f><parameter=a>", "</parameter "),
    "keys": ("<tool_call>f", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    "openings of values": ("<tool_call>f", "<arg_key>a</arg_key><arg_value>"),
    "fenced calls": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ),
    "sections": ("", "<|tool_calls_section_begin|><|tool_call_begin|>"),
    "headers": ("", "<|start|>assistant<|channel|>final<|message|>"),
    "calls in channels": ("", "<|channel|>x to=f<|message|>{}<|call|>"),
    "thoughts": ("<think>", "</think \n"),
    "newlines in thoughts": ("<think>", "\n"),
}


def meant(name: str, text: str) -> bool:
    """Return whether a format reads more than plain text; every format is tried on brackets."""
    made = TOOL_FORMATS[name]("")
    return len(text) < 4 or any(mark in text for mark in ("<think>", *made.markers, *made.at_start))


MEANT = {
    f"{name}: {case}": (name, start, more)
    for name in FORMATS
    for case, (start, more) in ENDLESS.items()
    if meant(name, start + more)
}


def parser(name: str) -> ChatParser:
    return ChatParser(tool_format(name, ""), reasoning=True)


def operations(name: str, text: str, size: int) -> int:
    """Calls of functions made to read a text in pieces of a size."""
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    reader = parser(name)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        for piece in pieces:
            reader.push(piece)
        reader.finish()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.few(33)
@pytest.mark.parametrize(("name", "start", "more"), MEANT.values(), ids=MEANT)
def test_twice_the_text_costs_about_twice_the_operations(name: str, start: str, more: str) -> None:
    for size in (3, 10**9):
        once, twice = (operations(name, start + more * times, size) for times in (150, 300))
        assert twice <= 2.1 * once + 50


@pytest.mark.parametrize(("name", "start", "more"), MEANT.values(), ids=MEANT)
def test_what_waits_to_be_read_stays_short(name: str, start: str, more: str) -> None:
    """Copies of it with every piece would otherwise cost the square of its length."""
    reader = parser(name)
    for piece in start + more * 100:
        reader.push(piece)
        text: GrowingText = reader._text
        assert len(text._piece) <= LONGEST + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_long_texts_of_the_beginnings_of_markers_come_out_as_they_went_in(name: str) -> None:
    for text in ("<" * 200_000, "[" * 200_000, "  \n<" * 50_000):
        reader = parser(name)
        assert joined([reader.push(text), reader.finish()]) == Message("assistant", text)


@pytest.mark.slow
def test_a_long_call_that_comes_by_single_characters_is_read() -> None:
    arguments = json.dumps({"text": 'é<tool_call> \\ " ' * 5_000})
    reader = parser("hermes")
    news = [reader.push(character) for character in f"<tool_call>{CALL}{arguments}}}</tool_call>"]
    (call,) = joined([*news, reader.finish()]).tool_calls
    assert call.arguments == arguments


@pytest.mark.parametrize("depth", [101, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_a_call_nested_too_deep_for_readers_that_recurse_is_content(
    opening: str, closing: str, depth: int
) -> None:
    text = f"<tool_call>{CALL}{opening * depth}1{closing * depth}}}</tool_call>"
    reader = parser("hermes")
    assert joined([reader.push(text), reader.finish()]) == Message("assistant", text)


def test_a_number_of_any_length_stays_as_it_was_written() -> None:
    digits = "9" * 10_000  # more than Python turns into an int
    reader = parser("hermes")
    (call,) = reader.push(
        f'<tool_call>{CALL}{{"n": {digits}, "m": 1.10e5}}}}</tool_call>'
    ).tool_calls
    assert call.arguments == f'{{"n": {digits}, "m": 1.10e5}}'
