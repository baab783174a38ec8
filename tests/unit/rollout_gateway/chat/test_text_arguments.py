"""Arguments written as text between tags are read as the JSON that the tool's schema requires."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.services.rollout_gateway.chat.messages import joined
from paceline.services.rollout_gateway.chat.parse import ChatParser
from paceline.services.rollout_gateway.chat.tool_formats.families import tool_format

KINDS: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "s": ({"type": "string"}, st.text('ab1 \n<>/"é{}', max_size=8)),
    "n": ({"type": "number"}, st.floats(allow_nan=False, allow_infinity=False)),
    "i": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, st.none() | st.integers()),
    "b": ({"type": ["boolean", "null"]}, st.none() | st.booleans()),
    "o": ({"$ref": "#/$defs/o"}, st.dictionaries(st.text(max_size=2), st.integers(), max_size=2)),
    "l": ({"type": "array"}, st.lists(st.text(max_size=3), max_size=3)),
    "e": ({"enum": ["1", "x"]}, st.sampled_from(["1", "x"])),
}
TOOL = {
    "type": "object",
    "properties": {key: schema for key, (schema, _) in KINDS.items()},
    "$defs": {"o": {"type": "object"}},
}
ARGUMENTS = st.fixed_dictionaries({}, optional={key: how for key, (_, how) in KINDS.items()})
OPENINGS = {"qwen3_coder": "<tool_call>\n<function=f>\n", "glm45": "<tool_call>f\n"}


def spelled(name: str, arguments: dict[str, Any], python: bool) -> str:
    """Return the arguments as the models' templates write them in a call."""
    written = ""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if python and (value is None or isinstance(value, bool)):
            text = str(value)
        written += (
            f"<parameter={key}>\n{text}\n</parameter>\n"
            if name == "qwen3_coder"
            else f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"
        )
    end = "</function>\n" if name == "qwen3_coder" else ""
    return f"{OPENINGS[name]}{written}{end}</tool_call>"


@settings(max_examples=case_count(300), deadline=None)
@given(
    st.sampled_from(list(OPENINGS)),
    st.lists(ARGUMENTS, min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=30),
)
def test_what_a_template_wrote_is_read_back_with_its_types_however_it_is_cut(
    name: str, calls: list[dict[str, Any]], python: bool, sizes: list[int]
) -> None:
    text = "\n".join(spelled(name, one, python) for one in calls)
    bounds = [0, *itertools.accumulate(sizes)]
    chosen = tool_format(name, "")
    assert chosen is not None
    reader = ChatParser(chosen.offering({"f": TOOL}), reasoning=False)
    pieces = [text[start:end] for start, end in zip(bounds, [*bounds[1:], None], strict=True)]
    message = joined([*(reader.push(piece) for piece in pieces), reader.finish()])
    assert message.content == ""
    assert [json.loads(call.arguments) for call in message.tool_calls] == calls


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({}, "42", 42),  # no schema contradicts
        ({}, "four", "four"),
        ({}, "{'a': 1}", "{'a': 1}"),
        ({"type": "integer"}, "4.0", 4.0),
        ({"type": "integer"}, "four", "four"),  # the client's to refuse
        ({"type": ["string", "integer"]}, "4", 4),
        ({"type": ["string", "integer"]}, "4.5", "4.5"),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "boolean"}, " True ", True),
        ({"type": "string"}, "True", "True"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "9" * 5000, 0),
        ({"type": "array"}, "[" * 101 + "]" * 101, "[" * 101 + "]" * 101),  # nested too deep
        ({"$ref": "#/nowhere"}, "1", 1),
        ({"$ref": "#/properties/a"}, "1", 1),  # a reference to itself
    ],
)
def test_a_value_is_json_where_the_schema_lets_it_be(schema: Any, text: str, value: Any) -> None:
    chosen = tool_format("glm45", "")
    assert chosen is not None
    tool = {"type": "object", "properties": {"a": schema}}
    reader = ChatParser(chosen.offering({"f": tool}), reasoning=False)
    (call,) = reader.push(
        f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    ).tool_calls
    if value == 0:  # more digits than Python turns into an int stay as they are
        assert call.arguments == f'{{"a": {text}}}'
    else:
        assert json.loads(call.arguments) == {"a": value}
