"""Tool calls of Qwen3-Coder: the tags hold the names of function and parameters, with values as
text between them.
"""

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
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_TAGS = Tags("<parameter={}>\n", _PARAMETER_END, f"\n{_PARAMETER_END}\n")


class Qwen3Coder(ToolFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, on
    separate lines. These models sometimes omit the outer tags; a whole function counts without
    them.
    """

    name = "qwen3_coder"
    special_tokens = (_OPEN, _CLOSE, _FUNCTION)
    markers = (_OPEN, _FUNCTION)

    def __init__(self, tools: Sequence[Offered] = ()) -> None:
        self._tools: Mapping[str, Parameters] = {
            tool.name: Parameters(tool.parameters) for tool in tools
        }

    def offering(self, tools: Sequence[Offered]) -> ToolFormat:
        return Qwen3Coder(tools)

    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        wrapped = yield from text.at(_OPEN)
        if wrapped:
            text.take(len(_OPEN))
            yield from text.blanks()
        yield from text.expect(_FUNCTION)
        name = yield from text.run(NAME)
        yield from text.expect(">")
        written = yield from _parameters(text)
        if wrapped:
            yield from text.blanks()
            yield from text.expect(_CLOSE)
        if not name:
            raise Deviation
        return [SpelledCall(name, self._tools.get(name, Parameters({})).json(written))]

    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        arguments = Parameters(tool.parameters).pieces(rules, _TAGS)
        return [f"{_OPEN}\n{_FUNCTION}{tool.name}>\n", arguments, f"{_FUNCTION_END}\n{_CLOSE}"]

    def _written(self, call: SpelledCall, index: int) -> str:
        arguments = written_arguments(call.arguments, _TAGS)
        return f"{self.beginning(call.name)}\n{arguments}{_FUNCTION_END}\n{_CLOSE}"

    def beginning(self, name: str = "") -> str:
        return f"{_OPEN}\n{_FUNCTION}{name}{'>' if name else ''}"


def _parameters(text: GrowingText) -> Reading[dict[str, str]]:
    """Reads up to and including the end of the function. One line break on each side of a value
    belongs to its tags.
    """
    written: dict[str, str] = {}
    while True:
        yield from text.blanks()
        if (yield from text.at(_FUNCTION_END)):
            text.take(len(_FUNCTION_END))
            return written
        yield from text.expect(_PARAMETER)
        key = yield from text.until(">")
        value = yield from text.until(_PARAMETER_END)
        written[key] = value.removeprefix("\n").removesuffix("\n")
