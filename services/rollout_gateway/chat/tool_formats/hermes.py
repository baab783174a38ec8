"""Hermes' tool calls, also used by Qwen2.5 and Qwen3: a JSON object between <tool_call> and
</tool_call>.
"""

from __future__ import annotations

from paceline.services.rollout_gateway.chat.tool_formats.base import (
    Offered,
    Piece,
    SpelledCall,
    ToolFormat,
    call_beginning,
    call_pieces,
)
from paceline.services.rollout_gateway.chat.tool_formats.growing import GrowingText, Reading
from paceline.services.rollout_gateway.chat.tool_formats.json_text import call_object
from paceline.services.rollout_gateway.chat.tool_formats.lark import Rules

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one pair of tags per call."""

    name = "hermes"
    special_tokens = (_OPEN, _CLOSE)
    markers = (_OPEN,)

    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        yield from text.expect(_OPEN)
        yield from text.blanks()
        call = yield from call_object(text, ("arguments", "parameters"))
        yield from text.blanks()
        yield from text.expect(_CLOSE)
        return [call]

    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        return [f"{_OPEN}\n", *call_pieces(tool, rules), f"\n{_CLOSE}"]

    def beginning(self, name: str = "") -> str:
        return f"{_OPEN}\n{call_beginning(name)}"
