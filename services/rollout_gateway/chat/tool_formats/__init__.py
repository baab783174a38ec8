"""The forms of tool calls by model family: one file each, listed in the table."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import NotFound
from paceline.services.rollout_gateway.chat.tool_formats.base import (
    IdSource,
    Offered,
    SpelledCall,
    ToolFormat,
)
from paceline.services.rollout_gateway.chat.tool_formats.constrained import ToolGrammar, offered
from paceline.services.rollout_gateway.chat.tool_formats.deepseek_v3 import DeepSeekV3
from paceline.services.rollout_gateway.chat.tool_formats.glm45 import Glm45
from paceline.services.rollout_gateway.chat.tool_formats.growing import (
    BLANK,
    Deviation,
    GrowingText,
    Reading,
)
from paceline.services.rollout_gateway.chat.tool_formats.harmony import Harmony
from paceline.services.rollout_gateway.chat.tool_formats.hermes import Hermes
from paceline.services.rollout_gateway.chat.tool_formats.kimi_k2 import KimiK2
from paceline.services.rollout_gateway.chat.tool_formats.lark import Vocabulary
from paceline.services.rollout_gateway.chat.tool_formats.llama3_json import Llama3Json
from paceline.services.rollout_gateway.chat.tool_formats.mistral import Mistral
from paceline.services.rollout_gateway.chat.tool_formats.qwen3_coder import Qwen3Coder

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


__all__ = [
    "BLANK",
    "TOOL_FORMATS",
    "Deviation",
    "GrowingText",
    "Harmony",
    "IdSource",
    "Offered",
    "Reading",
    "SpelledCall",
    "ToolFormat",
    "ToolGrammar",
    "Vocabulary",
    "guess_format",
    "offered",
    "tool_format",
]
