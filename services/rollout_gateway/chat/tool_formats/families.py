"""The formats of tool calls by model family, in one table, and their readers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.services.rollout_gateway.chat.tool_formats import base, lark
from paceline.services.rollout_gateway.chat.tool_formats.form import HARMONY, Schemas, ToolFormat
from paceline.services.rollout_gateway.chat.tool_formats.typed_text import Parameters, Tags

Calls = base.Reading[list[base.SpelledCall]]


def _framed_calls(
    text: base.GrowingText,
    before: str,
    after: str,
    one: Callable[[base.GrowingText], base.Reading[base.SpelledCall]],
) -> Calls:
    """All calls between two marks; raises Deviation if they do not end."""
    yield from text.expect(before)
    calls: list[base.SpelledCall] = []
    while True:
        calls.append((yield from one(text)))
        yield from text.blanks()
        if (yield from text.skip(after)):
            return calls


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read_hermes(text: base.GrowingText, _: Schemas) -> Calls:
    yield from text.expect(_OPEN)
    call = yield from base.call_object(text)
    yield from text.expect(_CLOSE)
    return [call]


HERMES = ToolFormat(
    "hermes",
    call=f'{_OPEN}\n{{"name": $quoted, "arguments": $arguments}}\n{_CLOSE}',
    reader=_read_hermes,
    special_tokens=(_OPEN, _CLOSE),
    markers=(_OPEN,),
)
"""One pair of tags per call."""


_TAG = "<|python_tag|>"
_NO_BRACE = r"[ \t\r\n]*[^{ \t\r\n](?s:.*)"
"""Text that does not begin with a brace."""


def _read_llama(text: base.GrowingText, _: Schemas) -> Calls:
    """Arguments are required: without a marker, `{"name": "Ada"}` may also be a JSON answer."""
    if (yield from text.skip(";")):
        yield from text.blanks()
    yield from text.skip(_TAG)
    return [(yield from base.call_object(text, required=True))]


class _Llama(ToolFormat):
    def woven(
        self, rules: lark.Rules, calls: Callable[[str], lark.Lark], answer: lark.Lark | None
    ) -> lark.Lark:
        """Calls if the response begins with a brace or has the tag."""
        called = rules.sequence([rules.space(), calls("")])
        if answer is not None:
            return rules.either([called, answer])
        tagged = rules.sequence([rules.behind(_TAG, _NO_BRACE), calls("")])
        return rules.either([called, tagged, rules.regex(_NO_BRACE), rules.space()])


LLAMA = _Llama(
    "llama3_json",
    call='{"name": $quoted, "parameters": $arguments}',
    reader=_read_llama,
    special_tokens=(_TAG,),
    markers=(_TAG,),
    between="; ",
    at_start=("{",),
    after_calls=(";", "{"),
)
"""At the start of the response or after the tag."""


_MARKER, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read_named(text: base.GrowingText) -> base.Reading[base.SpelledCall]:
    name = yield from text.name()
    with_id = yield from text.skip(_ID)
    if with_id:  # an id invented by the model; the gateway gives calls their ids
        yield from text.run(base.NAME)
    yield from text.skip(_ARGUMENTS)
    return base.SpelledCall(name, (yield from base.json_arguments(text)))


def _read_mistral(text: base.GrowingText, _: Schemas) -> Calls:
    """All calls of an array or none: an unclosed array is no call."""
    yield from text.expect(_MARKER)
    yield from text.blanks()
    if not (yield from text.skip("[")):
        if (yield from text.at("{")):  # one call without an array around it
            return [(yield from base.call_object(text))]
        return [(yield from _read_named(text))]
    calls: list[base.SpelledCall] = []
    while True:
        calls.append((yield from base.call_object(text)))
        yield from text.blanks()
        if (yield from text.skip("]")):
            return calls
        yield from text.expect(",")


def _mistral(source: str) -> ToolFormat:
    """Reads arrays and single calls; the template decides the form of a forced beginning."""
    # Tokenizers made with sentencepiece put a space after the marker.
    array = f"{_MARKER} [" if f"{_MARKER} [" in source else f"{_MARKER}["
    form = ToolFormat(
        "mistral",
        call=f"{_MARKER}$name{_ARGUMENTS}$arguments",
        reader=_read_mistral,
        special_tokens=(_MARKER, _ID, _ARGUMENTS),
        markers=(_MARKER,),
        between="",
        id_prefix="",
        id_digits=9,  # the templates refuse other lengths
    )
    call = '{"name": $quoted, "arguments": $arguments}'
    listed = replace(form, call=call, before=array, between=", ", after="]")
    return form if _ARGUMENTS in source else listed


_V3_CALLS, _V3_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_V3_CALL, _V3_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_V3_SEPARATOR, _V3_FENCE, _V3_FENCE_END = "<｜tool▁sep｜>", "```json", "```"


def _deepseek(source: str) -> ToolFormat:
    """Reads fenced and bare arguments; the template decides the form that a grammar writes."""
    fenced = _V3_FENCE in source
    head = f"function{_V3_SEPARATOR}$name\n{_V3_FENCE}\n" if fenced else f"$name{_V3_SEPARATOR}"
    end = f"\n{_V3_FENCE_END}" if fenced else ""
    return ToolFormat(
        "deepseek_v3",
        call=f"{_V3_CALL}{head}$arguments{end}{_V3_CALL_END}",
        reader=lambda text, tools: _framed_calls(text, _V3_CALLS, _V3_CALLS_END, _read_deepseek),
        special_tokens=(_V3_CALLS, _V3_CALLS_END, _V3_CALL, _V3_CALL_END, _V3_SEPARATOR),
        markers=(_V3_CALLS,),
        before=_V3_CALLS,
        between="\n" if fenced else "",
        after=_V3_CALLS_END,
    )


def _read_deepseek(text: base.GrowingText) -> base.Reading[base.SpelledCall]:
    yield from text.expect(_V3_CALL)
    name = yield from text.name()
    yield from text.expect(_V3_SEPARATOR)
    fenced = (yield from text.peek()) not in ("{", '"', " ", "\n")
    if fenced:  # text before the separator is the type
        name = yield from text.name()
        yield from text.expect(_V3_FENCE)
    arguments = yield from base.json_arguments(text)
    if fenced:
        yield from text.expect(_V3_FENCE_END)
    yield from text.expect(_V3_CALL_END)
    return base.SpelledCall(name, arguments)


_K2_CALLS, _K2_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_K2_CALL, _K2_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_K2_ARGUMENTS = "<|tool_call_argument_begin|>"
_K2_ID = re.compile(r"^functions\.(?=.)|(?<=.):\d+$")
"""Text around the name of the tool in a call's id."""
KIMI = ToolFormat(
    "kimi_k2",
    call=f"{_K2_CALL}functions.$name:$number{_K2_ARGUMENTS}$arguments{_K2_CALL_END}",
    reader=lambda text, tools: _framed_calls(text, _K2_CALLS, _K2_CALLS_END, _read_kimi),
    special_tokens=(_K2_CALLS, _K2_CALLS_END, _K2_CALL, _K2_CALL_END, _K2_ARGUMENTS),
    markers=(_K2_CALLS,),
    before=_K2_CALLS,
    between="",
    after=_K2_CALLS_END,
)
"""The template writes the id before a tool's result, so clients receive it as the call's id."""


def _read_kimi(text: base.GrowingText) -> base.Reading[base.SpelledCall]:
    yield from text.expect(_K2_CALL)
    call_id = yield from text.name()
    yield from text.expect(_K2_ARGUMENTS)
    arguments = yield from base.json_arguments(text)
    yield from text.expect(_K2_CALL_END)
    return base.SpelledCall(_K2_ID.sub("", call_id), arguments, call_id)


_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


def _glm(source: str) -> ToolFormat:
    """Tags are on separate lines up to GLM-4.6; the template decides which form a grammar
    writes.
    """
    line = "" if f"{_KEY_END}{_VALUE}" in source else "\n"
    return ToolFormat(
        "glm45",
        call=f"{_OPEN}$name{line}$arguments{_CLOSE}",
        reader=_read_glm,
        special_tokens=(_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END),
        markers=(_OPEN,),
        tags=Tags(f"{_KEY}{{}}{_KEY_END}{line}{_VALUE}", _VALUE_END, _VALUE_END + line),
    )


def _read_glm(text: base.GrowingText, tools: Schemas) -> Calls:
    yield from text.expect(_OPEN)
    name = yield from text.name()
    written: dict[str, str] = {}
    while True:
        yield from text.blanks()
        if (yield from text.skip(_CLOSE)):
            return [base.SpelledCall(name, Parameters(tools.get(name, {})).json(written))]
        yield from text.expect(_KEY)
        key = yield from text.until(_KEY_END)
        yield from text.expect(_VALUE)
        written[key.strip()] = yield from text.until(_VALUE_END)


_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _read_qwen(text: base.GrowingText, tools: Schemas) -> Calls:
    wrapped = yield from text.skip(_OPEN)
    yield from text.expect(_FUNCTION)
    name = yield from text.name()
    yield from text.expect(">")
    written: dict[str, str] = {}
    while True:
        yield from text.blanks()
        if (yield from text.skip(_FUNCTION_END)):
            break
        yield from text.expect(_PARAMETER)
        key = yield from text.until(">")
        value = yield from text.until(_PARAMETER_END)
        # One line break on each side of a value belongs to its tags.
        written[key] = value.removeprefix("\n").removesuffix("\n")
    if wrapped:
        yield from text.expect(_CLOSE)
    return [base.SpelledCall(name, Parameters(tools.get(name, {})).json(written))]


QWEN = ToolFormat(
    "qwen3_coder",
    call=f"{_OPEN}\n{_FUNCTION}$name>$arguments\n{_FUNCTION_END}\n{_CLOSE}",
    reader=_read_qwen,
    special_tokens=(_OPEN, _CLOSE, _FUNCTION),
    markers=(_OPEN, _FUNCTION),
    tags=Tags(f"\n{_PARAMETER}{{}}>\n", _PARAMETER_END, f"\n{_PARAMETER_END}"),
)
"""These models sometimes omit the outer tags; a whole function counts without them."""


TOOL_FORMATS: dict[str, Callable[[str], ToolFormat]] = {
    "hermes": lambda source: HERMES,
    "llama3_json": lambda source: LLAMA,
    "mistral": _mistral,
    "qwen3_coder": lambda source: QWEN,
    "glm45": _glm,
    "deepseek_v3": _deepseek,
    "kimi_k2": lambda source: KIMI,
    "harmony": lambda source: HARMONY,
}
"""Formats by name, each built from the source of the chat template."""
_MARKS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("qwen3_coder", (_OPEN, _FUNCTION)),  # XML between Hermes' tags, as in GLM
    ("glm45", (_OPEN, _KEY)),
    ("hermes", (_OPEN,)),
    ("deepseek_v3", (_V3_CALLS,)),
    ("kimi_k2", (_K2_CALLS,)),
    ("kimi_k2", ("tool_declare<|im_middle|>",)),  # the first templates of Kimi K2 show no calls
    ("harmony", HARMONY.special_tokens[:3]),
    ("mistral", (_MARKER,)),
    ("llama3_json", (_TAG,)),
    ("llama3_json", ('{"name": ', '"parameters": ')),
)
"""Texts of a chat template that name its format; the first row found in it counts."""


def tool_format(name: str, template_source: str) -> ToolFormat | None:
    """The format of that name; "none" is None. "auto": the format in which the chat template writes
    past calls; None without tools, or for an unknown format.
    """
    source = template_source.replace('\\"', '"')  # quotes inside strings of the template
    marked = (one for one, marks in _MARKS if all(mark in source for mark in marks))
    found = next(marked, "none") if name == "auto" else name
    return None if found == "none" else TOOL_FORMATS[found](template_source)


def offered_schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Schemas of the tools of a request by name."""
    functions = (tool["function"] for tool in tools)
    return {str(one["name"]): one.get("parameters") or {} for one in functions}
