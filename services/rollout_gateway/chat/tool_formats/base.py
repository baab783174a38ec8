"""Declares a format of tool calls, and reads text that arrives in pieces.

A reader is a generator that yields when it needs more text. Straight code then gives the same
result for any cuts, and reads every character a bounded number of times.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from paceline.services.rollout_gateway.chat.tool_formats.lark import Lark, Rules, Vocabulary

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A reader of growing text that returns a value; each yield waits for more text."""

BLANK = " \t\r\n"
_BLANKS = re.compile(f"[{BLANK}]+")


class Deviation(Exception):
    """The text does not match.

    It never leaves this package and the parser: the text then counts as content.
    """


class GrowingText:
    """A text with an unknown end.

    Read text is kept until `forget`, so that an invalid call can be returned as content.
    """

    def __init__(self) -> None:
        self._piece = ""
        self._at = 0
        self._kept: list[str] = []  # a list: a growing string would be copied with every piece
        self.ended = False

    def push(self, piece: str) -> None:
        """Adds text. Unread text is at most the beginning of a marker."""
        self._piece = self._piece[self._at :] + piece
        self._at = 0

    def peek(self) -> Reading[str]:
        """The next character, or "" at the end, without reading it."""
        while self._at == len(self._piece) and not self.ended:
            yield
        return self._piece[self._at : self._at + 1]

    def at(self, word: str) -> Reading[bool]:
        """Whether `word` is next, without reading it. Waits only while the text may still become
        `word`.
        """
        while (
            not self.ended
            and word.startswith(rest := self._piece[self._at : self._at + len(word)])
            and rest != word
        ):
            yield
        return self._piece.startswith(word, self._at)

    def take(self, count: int = 1) -> None:
        """Reads characters checked by `peek` or `at`."""
        self._keep(self._at + count)

    def take_known(self, pattern: re.Pattern[str]) -> None:
        """Reads the match of `pattern` in the available text, which may be empty."""
        if match := pattern.match(self._piece, self._at):
            self._keep(match.end())

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads and returns the longest run of characters of a class; `pattern` is that class with
        a plus.
        """
        start = self.mark()
        while (yield from self.peek()) and (match := pattern.match(self._piece, self._at)):
            self._keep(match.end())
        return self.since(start)

    def blanks(self) -> Reading[None]:
        """Takes white space, if any."""
        if (yield from self.peek()) in BLANK:
            yield from self.run(_BLANKS)

    def expect(self, word: str) -> Reading[None]:
        """Reads `word`. Raises Deviation without reading if other text is next."""
        if not (yield from self.at(word)):
            raise Deviation
        self.take(len(word))

    def expect_end(self) -> Reading[None]:
        """Raises Deviation if there is more text."""
        if (yield from self.peek()):
            raise Deviation

    def until(self, word: str) -> Reading[str]:
        """Reads text up to and including `word`; returns the text before it.

        Raises Deviation if `word` is absent.
        """
        start, plain = self.mark(), re.compile(f"[^{re.escape(word[0])}]+")
        while not (yield from self.at(word)):
            if not (yield from self.peek()):
                raise Deviation
            self.take()
            self.take_known(plain)
        found = self.since(start)
        self.take(len(word))
        return found

    def mark(self) -> int:
        """A position for `since`."""
        return len(self._kept)

    def since(self, mark: int) -> str:
        """Text read since a mark."""
        return "".join(self._kept[mark:])

    def forget(self) -> str:
        """Text read since the last call of `forget`, which is no longer kept."""
        text = "".join(self._kept)
        self._kept.clear()
        return text

    def _keep(self, end: int) -> None:
        self._kept.append(self._piece[self._at : end])
        self._at = end


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
