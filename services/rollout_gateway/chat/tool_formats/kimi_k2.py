"""Tool calls of Kimi-K2: between special tokens, each with an id of function name and number."""

from __future__ import annotations

import re

from paceline.services.rollout_gateway.chat.tool_formats.base import (
    NAME,
    CallFrame,
    Offered,
    Piece,
    SpelledCall,
    ToolFormat,
    framed_calls,
)
from paceline.services.rollout_gateway.chat.tool_formats.growing import (
    Deviation,
    GrowingText,
    Reading,
)
from paceline.services.rollout_gateway.chat.tool_formats.json_text import json_arguments
from paceline.services.rollout_gateway.chat.tool_formats.lark import Rules

_ALL, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ONE, _ONE_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class KimiK2(ToolFormat):
    """`functions.NAME:NUMBER` and an object for each call. The template writes that id before a
    tool's result, so clients receive it as the call's id.
    """

    name = "kimi_k2"
    special_tokens = (_ALL, _ALL_END, _ONE, _ONE_END, _ARGUMENTS)
    markers = (_ALL,)
    frame = CallFrame(_ALL, "", _ALL_END)

    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        return (yield from framed_calls(text, _ALL, _ALL_END, _one))

    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        number, arguments = rules.regex("[0-9]{1,4}"), rules.json(tool.parameters)
        return [f"{_ONE}functions.{tool.name}:", number, _ARGUMENTS, arguments, _ONE_END]

    def _written(self, call: SpelledCall, index: int) -> str:
        named = f"{_ONE}functions.{call.name}:{index}"
        return f"{named}{_ARGUMENTS}{call.arguments}{_ONE_END}"

    def beginning(self, name: str = "") -> str:
        return f"{_ALL}{_ONE}functions.{name}{':' if name else ''}"


def _one(text: GrowingText) -> Reading[SpelledCall]:
    yield from text.expect(_ONE)
    yield from text.blanks()
    call_id = yield from text.run(NAME)
    named = _ID.fullmatch(call_id)
    yield from text.blanks()
    yield from text.expect(_ARGUMENTS)
    yield from text.blanks()
    if named is None:
        raise Deviation
    arguments = yield from json_arguments(text)
    yield from text.blanks()
    yield from text.expect(_ONE_END)
    return SpelledCall(named[1], arguments, call_id)
