"""Declares what a spelling of tool calls is."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.services.rollout_gateway.chat.tool_formats.growing import GrowingText, Reading
from paceline.services.rollout_gateway.chat.tool_formats.lark import Lark, Rules, Vocabulary

IdSource = Callable[[int], str]
"""That many hexadecimal digits, different ones with every call."""


class SpelledCall(NamedTuple):
    """A call as the model spelled it."""

    name: str
    arguments: str  # JSON text
    call_id: str = ""  # where the spelling has one that its templates want back


class Offered(NamedTuple):
    """A tool that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments; {}: any object


Piece = str | Lark
"""Of a spelled call: text as it stands, or a grammar's expression for what varies."""


Calls = Callable[[Rules, str], Lark]
"""The grammar of calls that begin with a text, without that text."""


class CallFrame(NamedTuple):
    """What stands around calls that are made together."""

    before: str = ""
    between: str | None = None  # None: a response holds one call
    after: str = ""


def framed_calls(
    text: GrowingText, before: str, after: str, one: Callable[[GrowingText], Reading[SpelledCall]]
) -> Reading[list[SpelledCall]]:
    """All calls between two marks, or none: raises Deviation where they do not end."""
    yield from text.expect(before)
    calls: list[SpelledCall] = []
    while True:
        yield from text.blanks()
        if calls and (yield from text.at(after)):
            text.take(len(after))
            return calls
        calls.append((yield from one(text)))


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

    channels: bool = False
    """Whether every response is written in it, with tools or without."""
    ends: tuple[str, ...] = ()
    """Tokens that end a response, where the model's own list of them is shorter."""
    content_beginning: str = ""
    """What stands before content; where it is forced, it begins the response."""
    frame: CallFrame = CallFrame(between="\n")
    """Around calls that follow a grammar."""

    @abstractmethod
    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        """One call of a tool with arguments that match its schema, as the pieces of a grammar.

        What `beginning` returns begins the frame and the text of the first pieces. Raises
        InvalidInput for a schema that this spelling cannot hold to.
        """

    def written(self, calls: Sequence[SpelledCall]) -> str:
        """Calls as the model writes them, so that `read` returns them."""
        between = self.frame.between or ""
        spelled = between.join(self._written(call, index) for index, call in enumerate(calls))
        return f"{self.frame.before}{spelled}{self.frame.after}"

    def _written(self, call: SpelledCall, index: int) -> str:
        """One call inside its frame."""
        pieces = self.spelled(Offered(call.name, {}), Rules(Vocabulary({})))
        return "".join(one if isinstance(one, str) else call.arguments for one in pieces)

    def woven(self, rules: Rules, calls: Calls, answer: Lark | None = None) -> Lark:
        """Free text with calls in it; with a form for the answer calls alone or that."""
        if answer is not None:
            return rules.either([calls(rules, ""), answer])
        free = rules.free_text(self.markers)
        marker = self.markers[0]
        called = rules.sequence([rules.up_to(marker, free), calls(rules, marker)])
        return rules.sequence([Lark(f"({called.text})*"), free.whole])

    def offering(self, tools: Sequence[Offered]) -> ToolFormat:
        """The format as it reads calls of these tools: where arguments are text, their schemas
        tell the types.
        """
        return self

    @abstractmethod
    def beginning(self, name: str = "") -> str:
        """What to put before the response so that it calls the tool `name`, or some tool.

        It ends where a tokenizer would cut as well: after a colon, not after the space that belongs
        to the next token.
        """

    def call_id(self, digits: IdSource) -> str:
        """A new id in the form that the chat templates of these models accept: any, so OpenAI's."""
        return "call_" + digits(24)


NAME = re.compile(r"[\w.:/-]+")
"""Name of a tool where no quotes stand around it."""


def call_pieces(tool: Offered, rules: Rules, arguments: str = "arguments") -> list[Piece]:
    """A call as a JSON object."""
    name = json.dumps(tool.name, ensure_ascii=False)
    return [f'{{"name": {name}, "{arguments}": ', rules.json(tool.parameters), "}"]


def call_beginning(name: str, arguments: str = "arguments") -> str:
    """The beginning of a call as a JSON object; with a name up to its arguments."""
    named = f' {json.dumps(name, ensure_ascii=False)}, "{arguments}":' if name else ""
    return f'{{"name":{named}'
