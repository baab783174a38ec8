"""The forms of tool calls by model family, listed in one table, and their grammars for
responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InternalError, InvalidInput, NotFound
from paceline.services.rollout_gateway.chat.tool_formats.base import (
    NAME,
    Offered,
    Piece,
    ToolFormat,
)
from paceline.services.rollout_gateway.chat.tool_formats.harmony import Harmony
from paceline.services.rollout_gateway.chat.tool_formats.json_formats import (
    DeepSeekV3,
    Hermes,
    KimiK2,
    Llama3Json,
    Mistral,
)
from paceline.services.rollout_gateway.chat.tool_formats.lark import Lark, Rules, Vocabulary
from paceline.services.rollout_gateway.chat.tool_formats.tag_formats import Glm45, Qwen3Coder

MORE_CALLS = 15
"""Most calls after the first one in a response."""


def offered(tools: Sequence[Mapping[str, Any]]) -> list[Offered]:
    """Tools from their form in requests."""
    functions = (tool["function"] for tool in tools)
    return [Offered(str(one["name"]), one.get("parameters") or {}) for one in functions]


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """Grammars for calls of these tools by one model."""

    tool_format: ToolFormat
    tools: Sequence[Offered]
    vocabulary: Vocabulary
    several: bool = True  # whether a response may have more than one call

    def __post_init__(self) -> None:
        for tool in self.tools:
            if not NAME.fullmatch(tool.name):
                raise InvalidInput(
                    "tools: a call that follows a grammar needs a plain name",
                    seen=tool.name[:80],
                    allowed="letters, digits and _ . : / -",
                )

    def required(self, begun: str) -> str:
        """A call and nothing else; `begun` is its beginning in the prompt."""
        rules = Rules(self.vocabulary)
        return rules.grammar(self._calls(rules, begun))

    def allowed(self, strict: Collection[str], after: str = "", answer: str = "") -> str:
        """Any text with calls in it. Calls of `strict` tools match their schemas; other calls have
        any object.

        `after`: text up to which the model reasons first. `answer`: a JSON schema for a response
        without calls; calls are then at its beginning.
        """
        tools = [
            tool if tool.name in strict else tool._replace(parameters={}) for tool in self.tools
        ]
        loose = ToolGrammar(self.tool_format, tools, self.vocabulary, self.several)
        rules = Rules(self.vocabulary)
        form = rules.json(json.loads(answer)) if answer else None
        start = self.tool_format.woven(rules, loose._calls, form)
        if after:
            start = rules.sequence([rules.until(after, after), rules.space(), start])
        return rules.grammar(start)

    def _calls(self, rules: Rules, begun: str) -> Lark:
        """Calls up to the end of their frame, without the text already in the prompt."""
        frame = self.tool_format.frame
        spelled = [self.tool_format.spelled(tool, rules) for tool in self.tools]
        first = rules.either([_spelled(rules, [frame.before, *one], begun) for one in spelled])
        parts = [first]
        if self.several and frame.between is not None and len(begun) <= len(self._begun):
            more = rules.either([_spelled(rules, [frame.between, *one]) for one in spelled])
            parts.append(Lark(f"({more.text}){{0,{MORE_CALLS}}}"))
        return rules.sequence([*parts, rules.text(frame.after)])

    @property
    def _begun(self) -> str:
        """The common beginning of any tool's call; a longer beginning names a tool."""
        return self.tool_format.beginning()


def _spelled(rules: Rules, pieces: Sequence[Piece], begun: str = "") -> Lark:
    merged: list[Piece] = [""]
    for piece in pieces:
        last = merged[-1]
        if isinstance(piece, str) and isinstance(last, str):
            merged[-1] = last + piece
        else:
            merged.append(piece)
    head = merged[0]
    if not (isinstance(head, str) and head.startswith(begun)):
        raise InternalError("a forced beginning is not that of the call", seen=begun, allowed=head)
    merged[0] = head[len(begun) :]
    return rules.sequence(
        rules.text(piece) if isinstance(piece, str) else piece for piece in merged
    )


TOOL_FORMATS: dict[str, Callable[[str], ToolFormat]] = {
    "hermes": lambda template_source: Hermes(),
    "llama3_json": lambda template_source: Llama3Json(),
    "mistral": Mistral,
    "qwen3_coder": lambda template_source: Qwen3Coder(),
    "glm45": Glm45,
    "deepseek_v3": DeepSeekV3,
    "kimi_k2": lambda template_source: KimiK2(),
    "harmony": lambda template_source: Harmony(),
}
"""Formats by name, each built from the source of the chat template."""


def tool_format(name: str, template_source: str) -> ToolFormat | None:
    """The format of that name; "none" is None, "auto" depends on the template. Raises NotFound."""
    if name == "none":
        return None
    if name == "auto":
        return guess_format(template_source)
    if name not in TOOL_FORMATS:
        raise NotFound(
            "no such tool format",
            seen=name,
            allowed=", ".join(["auto", "none", *sorted(TOOL_FORMATS)]),
        )
    return TOOL_FORMATS[name](template_source)


def guess_format(template_source: str) -> ToolFormat | None:
    """The format in which a chat template writes past calls; None without tools, or for an unknown
    format.
    """
    source = template_source.replace('\\"', '"')  # quotes inside strings of the template
    if "<tool_call>" in source:  # Qwen3-Coder and GLM write XML between Hermes' tags
        if "<function=" in source:
            return Qwen3Coder()
        return Glm45(template_source) if "<arg_key>" in source else Hermes()
    if "<｜tool▁calls▁begin｜>" in source:
        return DeepSeekV3(source)
    # Kimi-K2's first templates show no calls.
    if "<|tool_calls_section_begin|>" in source or "tool_declare<|im_middle|>" in source:
        return KimiK2()
    if all(mark in source for mark in ("<|start|>", "<|channel|>", "<|message|>")):
        return Harmony()
    if "[TOOL_CALLS]" in source:
        return Mistral(source)
    if "<|python_tag|>" in source or ('{"name": ' in source and '"parameters": ' in source):
        return Llama3Json()
    return None
