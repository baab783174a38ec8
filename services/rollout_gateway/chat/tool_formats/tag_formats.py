"""Tool calls with arguments as text between tags: GLM-4.5 and Qwen3-Coder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.services.rollout_gateway.chat.tool_formats import base, lark
from paceline.services.rollout_gateway.chat.tool_formats.typed_text import (
    Parameters,
    Tags,
    written_arguments,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class Glm45(base.ToolFormat):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with line
    breaks between the tags up to GLM-4.6; the template decides which one a grammar writes.
    """

    name = "glm45"
    special_tokens = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)
    markers = (_OPEN,)

    def __init__(self, template_source: str = "", tools: Sequence[base.Offered] = ()) -> None:
        self._template = template_source
        tight = f"{_KEY_END}{_VALUE}" in template_source
        self._line = "" if tight else "\n"
        self._tags = Tags(
            f"{_KEY}{{}}{_KEY_END}{self._line}{_VALUE}", _VALUE_END, _VALUE_END + self._line
        )
        self._tools: Mapping[str, Parameters] = {
            tool.name: Parameters(tool.parameters) for tool in tools
        }

    def offering(self, tools: Sequence[base.Offered]) -> base.ToolFormat:
        return Glm45(self._template, tools)

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        yield from text.expect(_OPEN)
        yield from text.blanks()
        name = yield from text.run(base.NAME)
        if not name:
            raise base.Deviation
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

        return [base.SpelledCall(name, self._tools.get(name, Parameters({})).json(written))]

    def spelled(self, tool: base.Offered, rules: lark.Rules) -> list[base.Piece]:
        arguments = Parameters(tool.parameters).pieces(rules, self._tags)
        return [f"{_OPEN}{tool.name}{self._line}", arguments, _CLOSE]

    def _written(self, call: base.SpelledCall, index: int) -> str:
        return f"{self.beginning(call.name)}{written_arguments(call.arguments, self._tags)}{_CLOSE}"

    def beginning(self, name: str = "") -> str:
        return f"{_OPEN}{name}{self._line if name else ''}"


_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_TAGS = Tags("<parameter={}>\n", _PARAMETER_END, f"\n{_PARAMETER_END}\n")


class Qwen3Coder(base.ToolFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, on
    separate lines. These models sometimes omit the outer tags; a whole function counts without
    them.
    """

    name = "qwen3_coder"
    special_tokens = (_OPEN, _CLOSE, _FUNCTION)
    markers = (_OPEN, _FUNCTION)

    def __init__(self, tools: Sequence[base.Offered] = ()) -> None:
        self._tools: Mapping[str, Parameters] = {
            tool.name: Parameters(tool.parameters) for tool in tools
        }

    def offering(self, tools: Sequence[base.Offered]) -> base.ToolFormat:
        return Qwen3Coder(tools)

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        wrapped = yield from text.at(_OPEN)
        if wrapped:
            text.take(len(_OPEN))
            yield from text.blanks()
        yield from text.expect(_FUNCTION)
        name = yield from text.run(base.NAME)
        yield from text.expect(">")
        written = yield from _parameters(text)
        if wrapped:
            yield from text.blanks()
            yield from text.expect(_CLOSE)
        if not name:
            raise base.Deviation
        return [base.SpelledCall(name, self._tools.get(name, Parameters({})).json(written))]

    def spelled(self, tool: base.Offered, rules: lark.Rules) -> list[base.Piece]:
        arguments = Parameters(tool.parameters).pieces(rules, _TAGS)
        return [f"{_OPEN}\n{_FUNCTION}{tool.name}>\n", arguments, f"{_FUNCTION_END}\n{_CLOSE}"]

    def _written(self, call: base.SpelledCall, index: int) -> str:
        arguments = written_arguments(call.arguments, _TAGS)
        return f"{self.beginning(call.name)}\n{arguments}{_FUNCTION_END}\n{_CLOSE}"

    def beginning(self, name: str = "") -> str:
        return f"{_OPEN}\n{_FUNCTION}{name}{'>' if name else ''}"


def _parameters(text: base.GrowingText) -> base.Reading[dict[str, str]]:
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
