"""Tool calls of DeepSeek-V3, R1 and V3.1: between tokens of their own, the arguments in a fence of
Markdown, or since V3.1 as they are.
"""

from __future__ import annotations

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

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _ONE_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "```json", "```"


class DeepSeekV3(ToolFormat):
    """Reads both forms; the template decides which one a grammar writes."""

    name = "deepseek_v3"
    special_tokens = (_ALL, _ALL_END, _ONE, _ONE_END, _SEPARATOR)
    markers = (_ALL,)

    def __init__(self, template_source: str = "") -> None:
        self._fenced = _FENCE in template_source
        self.frame = CallFrame(_ALL, "\n" if self._fenced else "", _ALL_END)

    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        return (yield from framed_calls(text, _ALL, _ALL_END, _one))

    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        arguments = rules.json(tool.parameters)
        if self._fenced:
            head = f"{_ONE}function{_SEPARATOR}{tool.name}\n{_FENCE}\n"
            return [head, arguments, f"\n{_FENCE_END}{_ONE_END}"]
        return [f"{_ONE}{tool.name}{_SEPARATOR}", arguments, _ONE_END]

    def beginning(self, name: str = "") -> str:
        if self._fenced:
            return f"{_ALL}{_ONE}function{_SEPARATOR}{name}"
        return f"{_ALL}{_ONE}{name}{_SEPARATOR if name else ''}"


def _one(text: GrowingText) -> Reading[SpelledCall]:
    yield from text.expect(_ONE)
    name = yield from text.run(NAME)
    yield from text.expect(_SEPARATOR)
    fenced = (yield from text.peek()) not in ("{", '"', " ", "\n")
    if fenced:  # text before the separator is the type
        name = yield from text.run(NAME)
        yield from text.blanks()
        yield from text.expect(_FENCE)
    yield from text.blanks()
    if not name:
        raise Deviation
    arguments = yield from json_arguments(text)
    yield from text.blanks()
    if fenced:
        yield from text.expect(_FENCE_END)
        yield from text.blanks()
    yield from text.expect(_ONE_END)
    return SpelledCall(name, arguments)
