"""Reads text that arrives in pieces, and names the parts of a tool call.

A reader is a generator that yields when it needs more text. Straight code then gives the same
result for any cuts, and reads every character a bounded number of times.
"""

import re
from collections.abc import Generator
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A reader of growing text that returns a value; each yield waits for more text."""

BLANK = " \t\r\n"
NAME = re.compile(r"[\w.:/-]+")
"""Name of a tool without quotes around it."""
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

    def at(self, *words: str) -> Reading[str]:
        """The first of the words that is next, without reading it; "" for none. Waits only while
        the text may still become one of them.
        """
        for word in words:
            while (
                not self.ended
                and word.startswith(rest := self._piece[self._at : self._at + len(word)])
                and rest != word
            ):
                yield
            if self._piece.startswith(word, self._at):
                return word
        return ""

    def skip(self, *words: str) -> Reading[bool]:
        """Reads the first of the words that is next; returns whether there is one."""
        found = yield from self.at(*words)
        if found:
            self.take(len(found))
        return bool(found)

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
        """Reads white space, if any."""
        if (yield from self.peek()) in BLANK:
            yield from self.run(_BLANKS)

    def expect(self, word: str) -> Reading[None]:
        """Reads `word` after any white space. Raises Deviation if other text is next."""
        yield from self.blanks()
        if not (yield from self.skip(word)):
            raise Deviation

    def name(self) -> Reading[str]:
        """Reads the name of a tool after any white space. Raises Deviation without a name."""
        yield from self.blanks()
        if not (found := (yield from self.run(NAME))):
            raise Deviation
        return found

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


class SpelledCall(NamedTuple):
    """A call in the model's own form."""

    name: str
    arguments: str  # JSON text
    call_id: str = ""  # if the form has an id that its templates need back
