"""How models spell tool calls: one file each, named in the table."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import NotFound
from rollout_gateway.chat.tool_formats.base import IdSource, SpelledCall, ToolFormat
from rollout_gateway.chat.tool_formats.growing import BLANK, Deviation, GrowingText, Reading
from rollout_gateway.chat.tool_formats.hermes import Hermes
from rollout_gateway.chat.tool_formats.llama3_json import Llama3Json
from rollout_gateway.chat.tool_formats.mistral import Mistral

TOOL_FORMATS: dict[str, Callable[[str], ToolFormat]] = {
    "hermes": lambda template_source: Hermes(),
    "llama3_json": lambda template_source: Llama3Json(),
    "mistral": Mistral,
}
"""Formats by name, each made from the source of the chat template."""


def tool_format(name: str, template_source: str) -> ToolFormat | None:
    """The format of that name; "none" has none, "auto" asks the template. Raises NotFound."""
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
    """The format that a chat template writes past calls in; None when it knows no tools, or another
    format.
    """
    source = template_source.replace('\\"', '"')  # quotes inside strings of the template
    # Qwen3-Coder and GLM write XML between the tags of Hermes.
    if "<tool_call>" in source and not any(
        other in source for other in ("<function=", "<arg_key>")
    ):
        return Hermes()
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
    "IdSource",
    "Reading",
    "SpelledCall",
    "ToolFormat",
    "guess_format",
    "tool_format",
]
