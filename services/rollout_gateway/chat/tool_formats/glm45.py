"""Tool calls of GLM-4.5 and later: a name, then keys and values in tags, values as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.services.rollout_gateway.chat.tool_formats.base import (
    NAME,
    Offered,
    Piece,
    SpelledCall,
    ToolFormat,
)
from paceline.services.rollout_gateway.chat.tool_formats.growing import (
    Deviation,
    GrowingText,
    Reading,
)
from paceline.services.rollout_gateway.chat.tool_formats.lark import Rules
from paceline.services.rollout_gateway.chat.tool_formats.typed_text import (
    Parameters,
    Tags,
    written_arguments,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class Glm45(ToolFormat):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with line
    breaks between the tags up to GLM-4.6; the template decides which one a grammar writes.
    """

    name = "glm45"
    special_tokens = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)
    markers = (_OPEN,)

    def __init__(self, template_source: str = "", tools: Sequence[Offered] = ()) -> None:
        self._template = template_source
        tight = f"{_KEY_END}{_VALUE}" in template_source
        self._line = "" if tight else "\n"
        self._tags = Tags(
            f"{_KEY}{{}}{_KEY_END}{self._line}{_VALUE}", _VALUE_END, _VALUE_END + self._line
        )
        self._tools: Mapping[str, Parameters] = {
            tool.name: Parameters(tool.parameters) for tool in tools
        }

    def offering(self, tools: Sequence[Offered]) -> ToolFormat:
        return Glm45(self._template, tools)

    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        yield from text.expect(_OPEN)
        yield from text.blanks()
        name = yield from text.run(NAME)
        if not name:
            raise Deviation
        written: dict[str, str] = {}
        while True:
            yield from text.blanks()
            if (yield from text.at(_CLOSE)):
                text.take(len(_CLOSE))
                break
            yield from text.expect(_KEY)
            key = yield from text.until(_KEY_END)
            yield from text.blanks()
            yield from text.expect(_VALUE)
            written[key.strip()] = yield from text.until(_VALUE_END)

        return [SpelledCall(name, self._tools.get(name, Parameters({})).json(written))]

    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        arguments = Parameters(tool.parameters).pieces(rules, self._tags)
        return [f"{_OPEN}{tool.name}{self._line}", arguments, _CLOSE]

    def _written(self, call: SpelledCall, index: int) -> str:
        return f"{self.beginning(call.name)}{written_arguments(call.arguments, self._tags)}{_CLOSE}"

    def beginning(self, name: str = "") -> str:
        return f"{_OPEN}{name}{self._line if name else ''}"
