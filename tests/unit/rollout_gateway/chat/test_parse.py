"""The parser's laws: the cuts of a text mean nothing, nothing is lost, nothing waits that need
not.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence

import pytest
from drawn_cases import case_count
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import InternalError
from paceline.services.rollout_gateway.chat.messages import Delta, Message, ToolCall, joined
from paceline.services.rollout_gateway.chat.parse import ChatParser
from paceline.services.rollout_gateway.chat.tool_formats.families import TOOL_FORMATS, tool_format

FORMATS = ["none", *TOOL_FORMATS]

PIECES = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
    ),
    *(
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<arg_key>a</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|channel|>analysis<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|start|>assistant",
        "<|end|>",
        "<|call|>",
    ),
    *(
        '{"name": "f", "arguments": {}}',
        '{"name":"g","parameters":{"a":[1,"</tool_call>"]}}',
        '{"name": "h"',
        "f",
        "{}",
    ),
    *(
        "<",
        "[",
        "{",
        "}",
        "]",
        ";",
        ",",
        '"',
        "\\",
        "é",
        "\N{GRINNING FACE}",
        "word",
        " ",
        "\n",
        "\n\n",
        "\t",
        "\xa0",
    ),
    '<tool_call>{"name": "f"}</tool_call>',
    '[TOOL_CALLS][{"name": "f"}]',
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)


def parser(
    name: str, *, reasoning: bool = True, started: bool = False, forced: str = ""
) -> ChatParser:
    numbers = itertools.count(1)
    return ChatParser(
        tool_format(name, ""),
        reasoning=reasoning,
        starts_in_reasoning=started,
        forced=forced,
        digits=lambda count: f"{next(numbers):0{count}x}",
    )


def deltas(reader: ChatParser, pieces: Sequence[str]) -> list[Delta]:
    return [*(reader.push(piece) for piece in pieces), reader.finish()]


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    """Split the text into pieces with these sizes; the last piece takes the rest."""
    bounds = [0, *itertools.accumulate(sizes)]
    return [text[start:end] for start, end in zip(bounds, [*bounds[1:], None], strict=True)]


@settings(max_examples=case_count(500), deadline=None)
@example("hermes", True, False, " \n<tool_call>", "<tool_call>", [1] * 12)
@given(
    st.sampled_from(FORMATS),
    st.booleans(),
    st.booleans(),
    TEXTS,
    st.sampled_from(["", "<tool_call>\n", '{"name":', "[TOOL_CALLS]", "</think>\n\n<tool_call>"]),
    st.lists(st.integers(0, 6), max_size=40),
)
def test_every_cut_of_a_text_gives_the_same_message(
    name: str, reasoning: bool, started: bool, text: str, forced: str, sizes: list[int]
) -> None:
    def message(pieces: Sequence[str], forced: str = "") -> Message:
        return joined(
            deltas(parser(name, reasoning=reasoning, started=started, forced=forced), pieces)
        )

    whole = message([forced + text])
    assert message(cut(text, sizes), forced) == whole
    assert message(list(text), forced) == whole


IN_JSON = ["hermes", "llama3_json", "mistral", "deepseek_v3", "kimi_k2"]
"""Formats with arguments in JSON and text around calls."""


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, str, Message]:
    """Draw a format, a response spelled in it by hand, and the response's message."""
    name = draw(st.sampled_from(IN_JSON))
    words = st.text('abc .,!é\n>")', max_size=12).map(str.strip)
    thoughts = draw(st.none() | words)
    before, after = draw(words), draw(words)
    values = st.dictionaries(
        st.text(max_size=3), st.text(max_size=6) | st.integers() | st.lists(st.booleans())
    )
    indent = draw(st.sampled_from([None, 1]))
    calls = [
        ToolCall(
            "",
            draw(st.text("abz_-9", min_size=1)),
            json.dumps(draw(values), indent=indent, ensure_ascii=False),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    if name == "llama3_json":
        before = after = ""
    space = draw(st.sampled_from(["", " ", "\n", "\n\n"]))
    spelled = _spelled(name, calls, space)
    if thoughts is None:
        start = ""
    else:
        start = draw(st.sampled_from(["", "\n"])) + f"<think>\n{thoughts}\n</think>\n\n"
    ids = [
        f"functions.{call.name}:{number}"
        if name == "kimi_k2"
        else f"{number + 1:09x}"
        if name == "mistral"
        else f"call_{number + 1:024x}"
        for number, call in enumerate(calls)
    ]
    message = Message(
        "assistant",
        before + after,
        thoughts or "",
        tuple(
            ToolCall(call_id, call.name, call.arguments)
            for call_id, call in zip(ids, calls, strict=True)
        ),
    )
    return name, start + before + space + spelled + space + after, message


def _spelled(name: str, calls: list[ToolCall], space: str) -> str:
    key = "parameters" if name == "llama3_json" else "arguments"
    objects = [f'{{"name": "{call.name}", "{key}": {call.arguments}}}' for call in calls]
    if name == "hermes":
        return space.join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    if name == "llama3_json":
        return f"{space};{space}".join(objects)
    if name == "kimi_k2":
        written = (
            f"<|tool_call_begin|>functions.{call.name}:{number}{space}"
            f"<|tool_call_argument_begin|>{space}{call.arguments}<|tool_call_end|>"
            for number, call in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"
    if name == "deepseek_v3":
        written = (
            f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>"
            if len(space) == 1
            else f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments}"
            f"\n```<｜tool▁call▁end｜>"
            for call in calls
        )
        return f"<｜tool▁calls▁begin｜>{space.join(written)}<｜tool▁calls▁end｜>"
    if len(calls) == 2:
        return space.join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in calls)
    return f"[TOOL_CALLS] [{', '.join(objects)}]"


@settings(max_examples=case_count(300), deadline=None)
@given(conversations(), st.lists(st.integers(0, 9), max_size=30))
def test_what_was_spelled_by_hand_is_read_back(
    spelled: tuple[str, str, Message], sizes: list[int]
) -> None:
    name, text, message = spelled
    assert joined(deltas(parser(name), cut(text, sizes))) == message


def solid(text: str) -> str:
    """The text without the white space that may be dropped around markers."""
    return text.translate({ord(blank): None for blank in " \t\r\n"})


OBJECTS = {  # by name, so that failure messages show the spelling of calls
    "f": '{"name": "f"}',
    "g": '{"name": "g", "arguments": {"a": "<tool_call>"}}',
    "h": '{"arguments": [1, 2], "name": "h", "why": 3}',
}
FRAGMENTS = [
    *OBJECTS.values(),
    *(f"<tool_call>{spelled}</tool_call>" for spelled in OBJECTS.values()),
]
FRAGMENTS += [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "_call>",
    "{",
    "}",
    '"',
    "w",
    "é",
    " ",
    "\n",
]


@settings(max_examples=case_count(600), deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
def test_nothing_but_markers_and_calls_is_missing_from_a_message(text: str) -> None:
    message = joined(deltas(parser("hermes"), [text]))
    said = solid(message.reasoning) + solid(message.content)
    thinks = text.strip().startswith("<think>")
    markers = "<think>" * thinks + "</think>" * (thinks and "</think>" in text)
    calls = "".join(
        f"<tool_call>{solid(OBJECTS[call.name])}</tool_call>" for call in message.tool_calls
    )
    assert Counter(solid(text)) == Counter(said + markers + calls)
    rest = iter(solid(text))
    assert all(character in rest for character in said), "said in another order"


@settings(max_examples=case_count(200), deadline=None)
@given(st.sampled_from(FORMATS), st.booleans(), st.text(max_size=30), st.integers(1, 5))
def test_a_text_without_markers_is_content_unchanged(
    name: str, reasoning: bool, text: str, size: int
) -> None:
    plain = text.replace("<", "").replace("[", "").replace("{", "")
    pieces = [plain[at : at + size] for at in range(0, len(plain), size)]
    assert joined(deltas(parser(name, reasoning=reasoning), pieces)) == Message("assistant", plain)


def test_content_waits_only_while_it_may_become_a_marker() -> None:
    reader = parser("hermes", reasoning=True)
    said = [
        reader.push(piece).content
        for piece in ["Hel", "lo", " ", "you <", "b> <to", "ol> <tool_call", "?", " \n"]
    ]
    assert said == ["Hel", "lo", "", " you", " <b>", " <tool>", " <tool_call?", ""]
    assert reader.finish() == Delta(" \n")


def test_without_a_format_white_space_does_not_wait() -> None:
    reader = parser("none")
    assert [reader.push(piece).content for piece in ["a ", "\n", "<tool_call>"]] == [
        "a ",
        "\n",
        "<tool_call>",
    ]


def test_a_call_is_given_out_when_it_is_complete() -> None:
    reader = parser("hermes")
    assert reader.push('Look: <tool_call>{"name": "f", "arguments": {}}</tool_call') == Delta(
        "Look:"
    )
    (call,) = reader.push(">").tool_calls
    assert (call.name, call.arguments) == ("f", "{}")
    (call,) = reader.push('<tool_call>{"name": "g"}</tool_call>').tool_calls
    assert call.name == "g"


def test_text_after_the_end_is_refused_and_a_second_end_says_nothing() -> None:
    reader = parser("hermes")
    assert reader.push("<to") == Delta()
    assert reader.finish() == Delta("<to")
    assert reader.finish() == Delta()
    with pytest.raises(InternalError, match="after the end"):
        reader.push("o")


def test_an_empty_response_is_an_empty_message() -> None:
    for name in FORMATS:
        assert joined(deltas(parser(name), [])) == Message("assistant")
        assert joined(deltas(parser(name), ["", ""])) == Message("assistant")


def test_a_forced_beginning_that_stays_broken_is_content() -> None:
    assert parser("hermes", forced='<tool_call>\n{"name":').push(" no") == Delta(
        '<tool_call>\n{"name": no'
    )
    assert parser("hermes", forced="<tool_call>").finish() == Delta("<tool_call>")
