"""Declares what a spelling of tool calls is."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from rollout_gateway.chat.tool_formats.growing import GrowingText, Reading

IdSource = Callable[[int], str]
"""That many hexadecimal digits, different ones with every call."""


class SpelledCall(NamedTuple):
    """A call as the model spelled it."""

    name: str
    arguments: str  # JSON text


class ToolFormat(ABC):
    """How a family of models spells its wishes to call tools."""

    name: str
    special_tokens: tuple[str, ...]
    """Texts that mark calls and are special tokens in some tokenizers: decoding must not drop them.
    """
    markers: tuple[str, ...]
    """One of these begins calls, anywhere in the content."""
    at_start: tuple[str, ...] = ()
    """One of these begins calls where nothing but white space precedes it."""
    after_calls: tuple[str, ...] = ()
    """One of these begins calls where nothing but white space lies between it and other calls."""

    @abstractmethod
    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        """Takes calls from their marker to their end.

        Raises Deviation, having taken the marker, when they are none.
        """

    @abstractmethod
    def beginning(self, name: str = "") -> str:
        """What to put before the response so that it calls the tool `name`, or some tool.

        It ends where a tokenizer would cut as well: after a colon, not after the space that belongs
        to the next token.
        """

    def call_id(self, digits: IdSource) -> str:
        """A new id in the form that the chat templates of these models accept: any, so OpenAI's."""
        return "call_" + digits(24)


def call_beginning(name: str, arguments: str = "arguments") -> str:
    """The beginning of a call as a JSON object; with a name up to its arguments."""
    named = f' {json.dumps(name, ensure_ascii=False)}, "{arguments}":' if name else ""
    return f'{{"name":{named}'
