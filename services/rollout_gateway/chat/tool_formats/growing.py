"""Text that comes in pieces, read once from left to right. Owns waiting for more; knows no marker
and no format.

A reader is a generator that yields when it needs more text. Written as straight code, it gives the
same result however the text is cut, and looks at every character a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""What reads growing text and returns a value; each yield is a wait for more."""

BLANK = " \t\r\n"
_BLANKS = re.compile(f"[{BLANK}]+")


class Deviation(Exception):
    """The text is not what was looked for.

    Never leaves this package and the parser: the text is content then.
    """


class GrowingText:
    """A text whose end is not known yet.

    What is taken is kept until `forget`, so that a call that turns out to be none can be given out
    as it stands.
    """

    def __init__(self) -> None:
        self._piece = ""
        self._at = 0
        self._kept: list[str] = []  # a list, as one growing string would be copied with every piece
        self.ended = False

    def push(self, piece: str) -> None:
        """More text. What has not been taken yet is at most the beginning of a marker."""
        self._piece = self._piece[self._at :] + piece
        self._at = 0

    def peek(self) -> Reading[str]:
        """The next character, or "" at the end. Takes nothing."""
        while self._at == len(self._piece) and not self.ended:
            yield
        return self._piece[self._at : self._at + 1]

    def at(self, word: str) -> Reading[bool]:
        """Whether `word` comes next; waits only while the text may still become it.

        Takes nothing.
        """
        while (
            not self.ended
            and word.startswith(rest := self._piece[self._at : self._at + len(word)])
            and rest != word
        ):
            yield
        return self._piece.startswith(word, self._at)

    def take(self, count: int = 1) -> None:
        """Takes characters that `peek` or `at` have seen."""
        self._keep(self._at + count)

    def take_known(self, pattern: re.Pattern[str]) -> None:
        """Takes what `pattern` matches of the text that is known by now; may be nothing."""
        if match := pattern.match(self._piece, self._at):
            self._keep(match.end())

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes and returns the longest run of characters of a class; `pattern` is that class with
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
        """Takes `word`. Raises Deviation, having taken nothing, when something else comes next."""
        if not (yield from self.at(word)):
            raise Deviation
        self.take(len(word))

    def expect_end(self) -> Reading[None]:
        """Raises Deviation when anything comes."""
        if (yield from self.peek()):
            raise Deviation

    def until(self, word: str) -> Reading[str]:
        """Takes text up to `word` and the word; returns what stands before it.

        Raises Deviation when it does not come.
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
        """A place for `since`."""
        return len(self._kept)

    def since(self, mark: int) -> str:
        """Text taken since a mark."""
        return "".join(self._kept[mark:])

    def forget(self) -> str:
        """Text taken since the last call of `forget`, no longer kept from here on."""
        text = "".join(self._kept)
        self._kept.clear()
        return text

    def _keep(self, end: int) -> None:
        self._kept.append(self._piece[self._at : end])
        self._at = end
