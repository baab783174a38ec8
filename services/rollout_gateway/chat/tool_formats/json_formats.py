"""Tool calls with JSON arguments: Hermes, Llama 3.1, Mistral, DeepSeek-V3 and Kimi-K2."""

from __future__ import annotations

import re

from paceline.services.rollout_gateway.chat.tool_formats import base, json_text, lark

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(base.ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one pair of tags per call."""

    name = "hermes"
    special_tokens = (_OPEN, _CLOSE)
    markers = (_OPEN,)

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        yield from text.expect(_OPEN)
        yield from text.blanks()
        call = yield from json_text.call_object(text, ("arguments", "parameters"))
        yield from text.blanks()
        yield from text.expect(_CLOSE)
        return [call]

    def spelled(self, tool: base.Offered, rules: lark.Rules) -> list[base.Piece]:
        return [f"{_OPEN}\n", *base.call_pieces(tool, rules), f"\n{_CLOSE}"]

    def beginning(self, name: str = "") -> str:
        return f"{_OPEN}\n{base.call_beginning(name)}"


_TAG = "<|python_tag|>"
_NO_BRACE = r"[ \t\r\n]*[^{ \t\r\n](?s:.*)"
"""Text that does not begin with a brace."""


class Llama3Json(base.ToolFormat):
    """`{"name": ..., "parameters": {...}}` at the start of the response or after `<|python_tag|>`.

    Parameters are required: without a marker, `{"name": "Ada"}` may also be a JSON answer.
    """

    name = "llama3_json"
    special_tokens = (_TAG,)
    markers = (_TAG,)
    at_start = ("{",)
    after_calls = (";", "{")
    frame = base.CallFrame(between="; ")

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        for before in (";", _TAG):
            if (yield from text.at(before)):
                text.take(len(before))
                yield from text.blanks()
        return [
            (yield from json_text.call_object(text, ("parameters", "arguments"), required=True))
        ]

    def spelled(self, tool: base.Offered, rules: lark.Rules) -> list[base.Piece]:
        return base.call_pieces(tool, rules, "parameters")

    def woven(
        self, rules: lark.Rules, calls: base.Calls, answer: lark.Lark | None = None
    ) -> lark.Lark:
        """Calls if the response begins with a brace or has the tag."""
        called = rules.sequence([rules.space(), calls(rules, "")])
        if answer is not None:
            return rules.either([called, answer])
        said = rules.regex(_NO_BRACE)
        tagged = rules.sequence([rules.behind(_TAG, _NO_BRACE), calls(rules, "")])
        return rules.either([called, tagged, said, rules.space()])

    def beginning(self, name: str = "") -> str:
        return base.call_beginning(name, "parameters")


_MARKER, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(base.ToolFormat):
    """Reads both forms; the template decides the form of a forced beginning."""

    name = "mistral"
    special_tokens = (_MARKER, _ID, _ARGUMENTS)
    markers = (_MARKER,)

    def __init__(self, template_source: str = "") -> None:
        self._named = _ARGUMENTS in template_source
        # Tokenizers made with sentencepiece put a space after the marker.
        self._array = f"{_MARKER} [" if f"{_MARKER} [" in template_source else f"{_MARKER}["
        self.frame = (
            base.CallFrame(between="") if self._named else base.CallFrame(self._array, ", ", "]")
        )

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        yield from text.expect(_MARKER)
        yield from text.blanks()
        if (yield from text.at("[")):
            return (yield from _array(text))
        if (yield from text.at("{")):  # one call without an array around it
            return [(yield from json_text.call_object(text, ("arguments", "parameters")))]
        return [(yield from _named(text))]

    def spelled(self, tool: base.Offered, rules: lark.Rules) -> list[base.Piece]:
        if self._named:
            return [f"{_MARKER}{tool.name}{_ARGUMENTS}", rules.json(tool.parameters)]
        return base.call_pieces(tool, rules)

    def beginning(self, name: str = "") -> str:
        if self._named:
            return f"{_MARKER}{name}{_ARGUMENTS}" if name else _MARKER
        return f"{self._array}{base.call_beginning(name)}"

    def call_id(self, digits: base.IdSource) -> str:
        """Nine letters and digits: the templates refuse other lengths."""
        return digits(9)


def _array(text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
    """All calls or none: an unclosed array is no call."""
    calls: list[base.SpelledCall] = []
    closing = "["
    while closing != "]":
        text.take()
        yield from text.blanks()
        calls.append((yield from json_text.call_object(text, ("arguments", "parameters"))))
        yield from text.blanks()
        closing = yield from text.peek()
        if closing not in (",", "]"):
            raise base.Deviation
    text.take()
    return calls


def _named(text: base.GrowingText) -> base.Reading[base.SpelledCall]:
    name = yield from text.run(base.NAME)
    if not name:
        raise base.Deviation
    if (yield from text.at(_ID)):  # an id invented by the model; the gateway gives calls their ids
        text.take(len(_ID))
        yield from text.run(base.NAME)
    if (yield from text.at(_ARGUMENTS)):
        text.take(len(_ARGUMENTS))
    yield from text.blanks()
    return base.SpelledCall(name, (yield from json_text.json_arguments(text)))


_V3_CALLS, _V3_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_V3_CALL, _V3_CALL_END, _V3_SEPARATOR = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_V3_FENCE, _V3_FENCE_END = "```json", "```"


class DeepSeekV3(base.ToolFormat):
    """Reads both forms; the template decides which one a grammar writes."""

    name = "deepseek_v3"
    special_tokens = (_V3_CALLS, _V3_CALLS_END, _V3_CALL, _V3_CALL_END, _V3_SEPARATOR)
    markers = (_V3_CALLS,)

    def __init__(self, template_source: str = "") -> None:
        self._fenced = _V3_FENCE in template_source
        self.frame = base.CallFrame(_V3_CALLS, "\n" if self._fenced else "", _V3_CALLS_END)

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        return (yield from base.framed_calls(text, _V3_CALLS, _V3_CALLS_END, _v3_call))

    def spelled(self, tool: base.Offered, rules: lark.Rules) -> list[base.Piece]:
        arguments = rules.json(tool.parameters)
        if self._fenced:
            head = f"{_V3_CALL}function{_V3_SEPARATOR}{tool.name}\n{_V3_FENCE}\n"
            return [head, arguments, f"\n{_V3_FENCE_END}{_V3_CALL_END}"]
        return [f"{_V3_CALL}{tool.name}{_V3_SEPARATOR}", arguments, _V3_CALL_END]

    def beginning(self, name: str = "") -> str:
        if self._fenced:
            return f"{_V3_CALLS}{_V3_CALL}function{_V3_SEPARATOR}{name}"
        return f"{_V3_CALLS}{_V3_CALL}{name}{_V3_SEPARATOR if name else ''}"


def _v3_call(text: base.GrowingText) -> base.Reading[base.SpelledCall]:
    yield from text.expect(_V3_CALL)
    name = yield from text.run(base.NAME)
    yield from text.expect(_V3_SEPARATOR)
    fenced = (yield from text.peek()) not in ("{", '"', " ", "\n")
    if fenced:  # text before the separator is the type
        name = yield from text.run(base.NAME)
        yield from text.blanks()
        yield from text.expect(_V3_FENCE)
    yield from text.blanks()
    if not name:
        raise base.Deviation
    arguments = yield from json_text.json_arguments(text)
    yield from text.blanks()
    if fenced:
        yield from text.expect(_V3_FENCE_END)
        yield from text.blanks()
    yield from text.expect(_V3_CALL_END)
    return base.SpelledCall(name, arguments)


_K2_CALLS, _K2_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_K2_CALL, _K2_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_K2_ARGUMENTS = "<|tool_call_argument_begin|>"
_K2_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class KimiK2(base.ToolFormat):
    """`functions.NAME:NUMBER` and an object for each call. The template writes that id before a
    tool's result, so clients receive it as the call's id.
    """

    name = "kimi_k2"
    special_tokens = (_K2_CALLS, _K2_CALLS_END, _K2_CALL, _K2_CALL_END, _K2_ARGUMENTS)
    markers = (_K2_CALLS,)
    frame = base.CallFrame(_K2_CALLS, "", _K2_CALLS_END)

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        return (yield from base.framed_calls(text, _K2_CALLS, _K2_CALLS_END, _k2_call))

    def spelled(self, tool: base.Offered, rules: lark.Rules) -> list[base.Piece]:
        number, arguments = rules.regex("[0-9]{1,4}"), rules.json(tool.parameters)
        return [f"{_K2_CALL}functions.{tool.name}:", number, _K2_ARGUMENTS, arguments, _K2_CALL_END]

    def _written(self, call: base.SpelledCall, index: int) -> str:
        named = f"{_K2_CALL}functions.{call.name}:{index}"
        return f"{named}{_K2_ARGUMENTS}{call.arguments}{_K2_CALL_END}"

    def beginning(self, name: str = "") -> str:
        return f"{_K2_CALLS}{_K2_CALL}functions.{name}{':' if name else ''}"


def _k2_call(text: base.GrowingText) -> base.Reading[base.SpelledCall]:
    yield from text.expect(_K2_CALL)
    yield from text.blanks()
    call_id = yield from text.run(base.NAME)
    named = _K2_ID.fullmatch(call_id)
    yield from text.blanks()
    yield from text.expect(_K2_ARGUMENTS)
    yield from text.blanks()
    if named is None:
        raise base.Deviation
    arguments = yield from json_text.json_arguments(text)
    yield from text.blanks()
    yield from text.expect(_K2_CALL_END)
    return base.SpelledCall(named[1], arguments, call_id)
