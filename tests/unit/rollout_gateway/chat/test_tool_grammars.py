"""Calls that follow a grammar are whole calls of tools offered, with arguments that an independent
validator takes, in every spelling, whether markers are tokens or text.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.chat.parse import ChatParser
from paceline.services.rollout_gateway.chat.tool_formats.families import TOOL_FORMATS, tool_format
from paceline.services.rollout_gateway.chat.tool_formats.form import ToolFormat

TOKENIZER = Path(__file__).parents[4] / "examples" / "demo" / "policy_start" / "tokenizer.json"
EOS = 1
LIMIT = 400
"""Tokens of a walk at most."""
STYLES = {  # format -> pieces of templates that decide its spelling
    "mistral": ["", "[TOOL_CALLS] [", "[TOOL_CALLS]x[ARGS]"],
    "glm45": ["", "</arg_key><arg_value>"],
    "deepseek_v3": ["", "```json"],
}
SPELLINGS = [(name, style) for name in TOOL_FORMATS for style in STYLES.get(name, [""])]
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
WEATHER: dict[str, Any] = {
    **OBJECT,
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["C", "°F"]},
        "dry": {"type": ["boolean", "null"]},
        "tags": {"$ref": "#/$defs/tags"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days", "unit"],
    "$defs": {
        "tags": {"type": "array", "maxItems": 2, "items": {"type": "string", "maxLength": 3}}
    },
}
LOOK: dict[str, Any] = {
    **OBJECT,
    "properties": {"q": {"type": "string", "pattern": "^[a-z]{2,4}$"}},
    "required": ["q"],
}
NOW = {**OBJECT, "properties": {}}
TOOLS = {"get_weather": WEATHER, "look": LOOK, "now": NOW}


@dataclass
class Model:
    """A tokenizer, and a model that generates any allowed token."""

    chosen: ToolFormat
    marked: bool  # markers are tokens of their own, every other one special
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(TOKENIZER))
        if self.marked:
            marks = [mark for mark in self.chosen.special_tokens if mark[-1] in ">]"]
            self.tokenizer.add_tokens(
                [AddedToken(mark, special=index % 2 == 0) for index, mark in enumerate(marks)]
            )
            self.tokenizer.add_special_tokens([AddedToken("<extra>", special=True)])
        self.size = self.tokenizer.get_vocab_size()
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.added = {token.content: number for number, token in added}
        self.guide = LLTokenizer(self.tokenizer.to_str(), n_vocab=self.size, eos_token=[EOS])

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.guide, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def takes(self, grammar: str, text: str, *, tokens: list[int] | None = None) -> bool:
        """Return whether a response may be this text and end."""
        matcher, ids = self.matcher(grammar), self.ids(text) if tokens is None else tokens
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def says(self, grammar: str, seed: int, begun: str = "") -> str | None:
        """A random response that begins with a text; None when it does not end in time."""
        matcher, choose = self.matcher(grammar), random.Random(seed)
        said = self.ids(begun)
        assert matcher.consume_tokens(said)
        for _ in range(LIMIT):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            may = np.flatnonzero(np.unpackbits(bits, count=self.size, bitorder="little")).tolist()
            if EOS in may and (len(may) == 1 or choose.random() < 0.5):
                return str(self.tokenizer.decode(said, skip_special_tokens=False))
            token = choose.choice([one for one in may if one != EOS])
            assert matcher.consume_token(token)
            said.append(token)
        return None


@functools.cache
def model(name: str, style: str, *, marked: bool) -> Model:
    chosen = tool_format(name, style)
    assert chosen is not None
    return Model(chosen, marked)


def read(one: Model, text: str, forced: str = "", *, thinks: bool = False) -> Message:
    reader = ChatParser(
        one.chosen.offering(TOOLS), reasoning=thinks, starts_in_reasoning=thinks, forced=forced
    )
    reader.push(text)
    reader.finish()
    return reader.message


def check(message: Message) -> None:
    for call in message.tool_calls:
        assert jsonschema_rs.is_valid(TOOLS[call.name], json.loads(call.arguments)), call


@pytest.mark.few(12)
@pytest.mark.parametrize("marked", [False, True], ids=["as text", "as tokens"])
@pytest.mark.parametrize(("name", "style"), SPELLINGS)
def test_a_required_or_named_call_is_a_valid_call_and_nothing_else(
    name: str, style: str, marked: bool
) -> None:
    one, counts = model(name, style, marked=marked), []
    for asked in ("", "look", "get_weather", "now"):
        tools = {name: tool for name, tool in TOOLS.items() if asked in ("", name)}
        begun = one.chosen.beginning(asked)
        grammar = one.chosen.offering(tools).required(one.added, begun)
        for seed in range(4 if asked else 20):
            text = one.says(grammar, seed)
            if text is None:
                continue
            message = read(one, text, begun)
            assert message.content == message.reasoning == "", text
            check(message)
            if asked:
                assert [call.name for call in message.tool_calls] == [asked]
            counts.append(len(message.tool_calls))
    assert min(counts) == 1
    assert len(counts) > 14
    assert name == "harmony" or max(counts) > 1


@pytest.mark.parametrize(("name", "style"), SPELLINGS)
def test_one_call_is_one_call(name: str, style: str) -> None:
    one = model(name, style, marked=True)
    begun = one.chosen.beginning()
    grammar = one.chosen.offering(TOOLS).required(one.added, begun, several=False)
    for seed in range(6):
        text = one.says(grammar, seed)
        assert text is None or len(read(one, text, begun).tool_calls) == 1


def opening(one: Model) -> str:
    """Free text up to where a call begins."""
    return f"Hm{one.chosen.markers[0]}" if one.chosen.name != "harmony" else one.chosen.beginning()


@pytest.mark.few(8)
@pytest.mark.parametrize("marked", [False, True], ids=["as text", "as tokens"])
@pytest.mark.parametrize(("name", "style"), SPELLINGS)
def test_a_strict_tool_is_called_right_or_not_at_all(name: str, style: str, marked: bool) -> None:
    one = model(name, style, marked=marked)
    grammar = one.chosen.offering(TOOLS).allowed(one.added, set(TOOLS))
    for seed in range(5):
        text = one.says(grammar, seed, opening(one))
        if text is not None:
            message = read(one, text)
            check(message)
            assert message.tool_calls, text
    plain = "Just <b>words</b> [1] {2}\n"
    if name == "harmony":
        plain = f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{one.chosen.content_beginning}{plain}"
    assert one.takes(grammar, plain)
    assert not one.takes(grammar, opening(one))


def test_a_tool_that_is_not_strict_is_called_with_any_object_and_others_never() -> None:
    one = model("hermes", "", marked=True)
    grammar = one.chosen.offering(TOOLS).allowed(one.added, {"look"})

    def call(name: str, arguments: str) -> str:
        return f'Hm <tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    assert one.takes(grammar, call("now", '{"a": [1]}') + " so" + call("look", '{"q": "ab"}'))
    assert not one.takes(grammar, call("now", "[]"))
    assert not one.takes(grammar, call("look", '{"q": 1}'))
    assert not one.takes(grammar, call("other", "{}"))


def test_markers_count_however_they_are_spelled() -> None:
    one = model("hermes", "", marked=True)
    grammar = one.chosen.offering({"look": LOOK}).allowed(one.added, {"look"})
    spelled = [number for letter in "<tool_call>" for number in one.ids(letter)]
    assert not one.takes(grammar, "", tokens=[*spelled, *one.ids("no")])
    rest = one.ids('\n{"name": "look", "arguments": {"q": "ab"}}\n</tool_call>')
    assert one.takes(grammar, "", tokens=[*spelled, *rest])
    extra = one.ids("<extra>")
    assert one.takes(grammar, "", tokens=[*extra, *spelled, *rest, *extra])


@pytest.mark.parametrize("marked", [False, True], ids=["as text", "as tokens"])
def test_a_function_without_its_outer_tags_is_no_way_round(marked: bool) -> None:
    one = model("qwen3_coder", "", marked=marked)
    grammar = one.chosen.offering({"look": LOOK}).allowed(one.added, {"look"})
    assert one.takes(grammar, "a <function and <b=c>")
    for before in ("", "<extra>" * marked):
        assert not one.takes(grammar, f"{before}Hm <function=look>\n</function>")
        assert not one.takes(
            grammar, f"{before}<function=look>\n</function><tool_call>\n<function=look>"
        )


def test_a_response_that_begins_with_a_brace_is_calls_for_llama() -> None:
    one = model("llama3_json", "", marked=True)
    grammar = one.chosen.offering({"look": LOOK}).allowed(one.added, {"look"})
    call = '{"name": "look", "parameters": {"q": "ab"}}'
    assert one.takes(grammar, call)
    assert one.takes(grammar, f"\n{call}; {call}")
    assert one.takes(grammar, f"Hm <|python_tag|>{call}")
    assert one.takes(grammar, "Hm {1}")
    assert one.takes(grammar, "")
    assert not one.takes(grammar, '{"answer": 1}')
    assert not one.takes(grammar, '{"name": "look", "parameters": {"q": 1}}')


@pytest.mark.parametrize(("name", "style"), SPELLINGS)
def test_with_a_form_for_the_answer_a_response_is_calls_or_that_form(name: str, style: str) -> None:
    one = model(name, style, marked=True)
    answer = json.dumps({**OBJECT, "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
    grammar = one.chosen.offering(TOOLS).allowed(one.added, set(), answer=answer)
    before = one.chosen.content_beginning
    person = json.dumps({**OBJECT, "properties": {"name": {"type": "string"}}})
    named = one.chosen.offering(TOOLS).allowed(one.added, set(), answer=person)
    assert one.takes(grammar, before + '{"a": 2}')
    assert not one.takes(grammar, before + '{"a": 3}')
    assert one.takes(named, before + '{"name": "Ada"}')
    assert not one.takes(grammar, "Hm")
    text = one.says(grammar, 3, one.chosen.beginning("now"))
    if text is not None:
        message = read(one, text)
        assert message.content == ""
        assert message.tool_calls


def test_reasoning_comes_before_what_follows_the_grammar() -> None:
    one = model("hermes", "", marked=False)
    grammar = one.chosen.offering(TOOLS).allowed(one.added, set(TOOLS), "</think>")
    assert one.takes(grammar, "<tool_call> is a tag\n</think>\n\nHello")
    assert not one.takes(grammar, "no end of it")
    assert not one.takes(grammar, "x</think><tool_call>")
    text = one.says(grammar, 1, "I call <tool_call>\n</think>\n\n<tool_call>")
    assert text is not None
    message = read(one, text, thinks=True)
    assert message.reasoning == "I call <tool_call>"
    check(message)


def only(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**OBJECT, "properties": {"a": schema}, **more}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    "tool",
    [
        only({}, anyOf=[{"required": ["a"]}]),
        only({"anyOf": [{"type": "string"}, {"type": "object"}]}),
        only({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}),
        only({"type": ["string", "integer"], "maxLength": 3}),
        only({"type": "string", "pattern": "^a|b$"}),
        only({"type": "string", "anyOf": [{"minLength": 3}, {"maxLength": 1}]}),
        only({"enum": ["</parameter></arg_value>"]}),
        {"properties": {"a>b": {}}},
    ],
)
def test_a_schema_that_text_cannot_be_held_to_is_refused(name: str, tool: dict[str, Any]) -> None:
    one = model(name, "", marked=False)
    with pytest.raises(InvalidInput, match=r"tools: .*allowed: .*without strict"):
        one.chosen.offering({"f": tool}).required(one.added, one.chosen.beginning())


def test_a_name_that_no_spelling_holds_is_refused() -> None:
    one = model("kimi_k2", "", marked=False)
    with pytest.raises(InvalidInput, match=r"tools: .*plain name.*two words"):
        one.chosen.offering({"two words": {}}).required(one.added, one.chosen.beginning())
