"""Mistral's tool calls: an array after [TOOL_CALLS], or since 2025 a name, [ARGS] and an object for
each call.
"""

from __future__ import annotations

from paceline.services.rollout_gateway.chat.tool_formats.base import (
    NAME,
    CallFrame,
    IdSource,
    Offered,
    Piece,
    SpelledCall,
    ToolFormat,
    call_beginning,
    call_pieces,
)
from paceline.services.rollout_gateway.chat.tool_formats.growing import (
    Deviation,
    GrowingText,
    Reading,
)
from paceline.services.rollout_gateway.chat.tool_formats.json_text import (
    call_object,
    json_arguments,
)
from paceline.services.rollout_gateway.chat.tool_formats.lark import Rules

_MARKER, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(ToolFormat):
    """Reads both forms; the template decides the form of a forced beginning."""

    name = "mistral"
    special_tokens = (_MARKER, _ID, _ARGUMENTS)
    markers = (_MARKER,)

    def __init__(self, template_source: str = "") -> None:
        self._named = _ARGUMENTS in template_source
        # Tokenizers made with sentencepiece put a space after the marker.
        self._array = f"{_MARKER} [" if f"{_MARKER} [" in template_source else f"{_MARKER}["
        self.frame = CallFrame(between="") if self._named else CallFrame(self._array, ", ", "]")

    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        yield from text.expect(_MARKER)
        yield from text.blanks()
        if (yield from text.at("[")):
            return (yield from _array(text))
        if (yield from text.at("{")):  # one call without an array around it
            return [(yield from call_object(text, ("arguments", "parameters")))]
        return [(yield from _named(text))]

    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        if self._named:
            return [f"{_MARKER}{tool.name}{_ARGUMENTS}", rules.json(tool.parameters)]
        return call_pieces(tool, rules)

    def beginning(self, name: str = "") -> str:
        if self._named:
            return f"{_MARKER}{name}{_ARGUMENTS}" if name else _MARKER
        return f"{self._array}{call_beginning(name)}"

    def call_id(self, digits: IdSource) -> str:
        """Nine letters and digits: the templates refuse other lengths."""
        return digits(9)


def _array(text: GrowingText) -> Reading[list[SpelledCall]]:
    """All calls or none: an unclosed array is no call."""
    calls: list[SpelledCall] = []
    closing = "["
    while closing != "]":
        text.take()
        yield from text.blanks()
        calls.append((yield from call_object(text, ("arguments", "parameters"))))
        yield from text.blanks()
        closing = yield from text.peek()
        if closing not in (",", "]"):
            raise Deviation
    text.take()
    return calls


def _named(text: GrowingText) -> Reading[SpelledCall]:
    name = yield from text.run(NAME)
    if not name:
        raise Deviation
    if (yield from text.at(_ID)):  # an id invented by the model; the gateway gives calls their ids
        text.take(len(_ID))
        yield from text.run(NAME)
    if (yield from text.at(_ARGUMENTS)):
        text.take(len(_ARGUMENTS))
    yield from text.blanks()
    return SpelledCall(name, (yield from json_arguments(text)))
