"""Declares a format of tool calls."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.services.rollout_gateway.chat.tool_formats.growing import GrowingText, Reading
from paceline.services.rollout_gateway.chat.tool_formats.lark import Lark, Rules, Vocabulary

IdSource = Callable[[int], str]
"""Returns a random text of that many hexadecimal digits."""


class SpelledCall(NamedTuple):
    """A call in the model's own form."""

    name: str
    arguments: str  # JSON text
    call_id: str = ""  # if the form has an id that its templates need back


class Offered(NamedTuple):
    """A tool that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments; {}: any object


Piece = str | Lark
"""Part of a call: fixed text, or a grammar's expression for variable text."""


Calls = Callable[[Rules, str], Lark]
"""The grammar of calls that begin with a text, without that text."""


class CallFrame(NamedTuple):
    """Text around calls in one response."""

    before: str = ""
    between: str | None = None  # None: a response has one call
    after: str = ""


def framed_calls(
    text: GrowingText, before: str, after: str, one: Callable[[GrowingText], Reading[SpelledCall]]
) -> Reading[list[SpelledCall]]:
    """All calls between two marks; raises Deviation if they do not end."""
    yield from text.expect(before)
    calls: list[SpelledCall] = []
    while True:
        yield from text.blanks()
        if calls and (yield from text.at(after)):
            text.take(len(after))
            return calls
        calls.append((yield from one(text)))


class ToolFormat(ABC):
    """The form in which a family of models calls tools."""

    name: str
    special_tokens: tuple[str, ...]
    """Marks of calls that are special tokens in some tokenizers, so decoding must keep them."""
    markers: tuple[str, ...]
    """Texts that begin calls, anywhere in the content."""
    at_start: tuple[str, ...] = ()
    """Texts that begin calls if only white space precedes them."""
    after_calls: tuple[str, ...] = ()
    """Texts that begin calls if only white space separates them from earlier calls."""

    @abstractmethod
    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        """Reads calls from their marker to their end.

        Raises Deviation after the marker if they are not calls.
        """

    channels: bool = False
    """Whether every response has this form, with tools or without."""
    ends: tuple[str, ...] = ()
    """Tokens that end a response, in addition to the model's own list."""
    content_beginning: str = ""
    """Text before content; if forced, it begins the response."""
    frame: CallFrame = CallFrame(between="\n")
    """Frame of calls that follow a grammar."""

    @abstractmethod
    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        """One call of a tool with arguments that match its schema, as the pieces of a grammar.

        The result of `beginning` starts the frame and the text of the first pieces. Raises
        InvalidInput for a schema that this form cannot enforce.
        """

    def written(self, calls: Sequence[SpelledCall]) -> str:
        """Calls in the model's form, so that `read` returns them."""
        between = self.frame.between or ""
        spelled = between.join(self._written(call, index) for index, call in enumerate(calls))
        return f"{self.frame.before}{spelled}{self.frame.after}"

    def _written(self, call: SpelledCall, index: int) -> str:
        """One call inside its frame."""
        pieces = self.spelled(Offered(call.name, {}), Rules(Vocabulary({})))
        return "".join(one if isinstance(one, str) else call.arguments for one in pieces)

    def woven(self, rules: Rules, calls: Calls, answer: Lark | None = None) -> Lark:
        """Free text with calls in it; with a form for the answer, only calls or that answer."""
        if answer is not None:
            return rules.either([calls(rules, ""), answer])
        free = rules.free_text(self.markers)
        marker = self.markers[0]
        called = rules.sequence([rules.up_to(marker, free), calls(rules, marker)])
        return rules.sequence([Lark(f"({called.text})*"), free.whole])

    def offering(self, tools: Sequence[Offered]) -> ToolFormat:
        """The format for calls of these tools; if arguments are text, the schemas give
        their types.
        """
        return self

    @abstractmethod
    def beginning(self, name: str = "") -> str:
        """Text before the response that makes it call the tool `name`, or any tool.

        It ends where a tokenizer would also cut: after a colon, not after the space of the next
        token.
        """

    def call_id(self, digits: IdSource) -> str:
        """A new id in a form that the chat templates of these models accept; by default
        OpenAI's.
        """
        return "call_" + digits(24)


NAME = re.compile(r"[\w.:/-]+")
"""Name of a tool without quotes around it."""


def call_pieces(tool: Offered, rules: Rules, arguments: str = "arguments") -> list[Piece]:
    """A call as a JSON object."""
    name = json.dumps(tool.name, ensure_ascii=False)
    return [f'{{"name": {name}, "{arguments}": ', rules.json(tool.parameters), "}"]


def call_beginning(name: str, arguments: str = "arguments") -> str:
    """The beginning of a call as a JSON object; with a name, up to its arguments."""
    named = f' {json.dumps(name, ensure_ascii=False)}, "{arguments}":' if name else ""
    return f'{{"name":{named}'
