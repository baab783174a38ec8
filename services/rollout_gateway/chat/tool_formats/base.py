"""Reads text that arrives in pieces, JSON in it, and names the parts of a tool call.

A reader is a generator that yields when it needs more text. Straight code then gives the same
result for any cuts, and reads every character a bounded number of times. JSON values are returned
as the model's exact text: parsing and writing them anew would change numbers and spaces.
"""

import itertools
import json
import re
from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from paceline.errors import is_whole

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


DEEPEST = 100
"""Deepest nesting of objects and arrays, since later readers of the arguments (clients, templates)
recurse.
"""

_BETWEEN = re.compile(r"[ \t\r\n:,0-9eE.+\-truefalsn]+")
"""Characters of JSON outside strings and brackets."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GAP = re.compile(r"[ \t\r\n:,]*")


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    parse_int=lambda digits: 0, parse_float=lambda digits: 0.5, parse_constant=_reject_constant
)
"""Decodes without numbers: Python refuses integers of many digits."""


def decode_json(text: str) -> Any:
    """The value of a JSON text, every number replaced by 0 or 0.5. Raises Deviation for another
    text, and for a value deeper than DEEPEST.
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise Deviation from error
    brackets = re.findall(r"[\[\]{}]", _STRING.sub("", text))
    depths = itertools.accumulate(1 if one in "[{" else -1 for one in brackets)
    if max(depths, default=0) > DEEPEST:
        raise Deviation
    return value


def json_object(text: GrowingText) -> Reading[str]:
    """Reads one JSON object and returns its text. Raises Deviation for any other text."""
    yield from text.blanks()
    start, depth = text.mark(), 0
    if (yield from text.peek()) != "{":
        raise Deviation
    while True:
        following = yield from text.peek()
        if following == '"':
            yield from _string(text)
        elif following and following in "{}[]":
            text.take()
            depth += 1 if following in "{[" else -1
            if depth > DEEPEST:
                raise Deviation
        elif not (yield from text.run(_BETWEEN)):
            raise Deviation
        if not depth:
            whole = text.since(start)
            decode_json(whole)
            return whole


def _string(text: GrowingText) -> Reading[str]:
    """Reads a string and returns its text. Its escapes are checked with the whole object."""
    start = text.mark()
    yield from text.expect('"')
    while True:
        yield from text.run(_PLAIN)
        if (yield from text.skip('"')):
            return text.since(start)
        if not (yield from text.skip("\\")) or not (yield from text.peek()):
            raise Deviation
        text.take()


def json_members(whole: str) -> dict[str, str]:
    """Texts of the members of a JSON object; of equal keys the last one counts, as in `json`."""
    members: dict[str, str] = {}
    at = _end_of_gap(whole, 1)
    while whole[at] != "}":
        key, end = _DECODER.raw_decode(whole, at)
        at = _end_of_gap(whole, end)
        _, end = _DECODER.raw_decode(whole, at)
        members[key] = whole[at:end]
        at = _end_of_gap(whole, end)
    return members


def _end_of_gap(whole: str, at: int) -> int:
    found = _GAP.match(whole, at)
    assert found is not None
    return found.end()


def json_arguments(text: GrowingText) -> Reading[str]:
    """Reads the arguments of a call: a JSON object, or a JSON string that contains one.

    Returns the text of the object. Raises Deviation for every other value.
    """
    yield from text.blanks()
    if (yield from text.peek()) == '"':
        return _arguments_object((yield from _string(text)))
    return (yield from json_object(text))


def _arguments_object(written: str) -> str:
    """The object of a call's arguments, from the text of a JSON value; a string is unwrapped.
    Raises Deviation for any other value.
    """
    if written.startswith('"'):
        written = _sendable(written).strip(BLANK)
        decode_json(written)
    if not written.startswith("{"):
        raise Deviation
    return written


def call_object(text: GrowingText, *, required: bool = False) -> Reading[SpelledCall]:
    """Reads a call written as an object with "name", and "arguments" or "parameters"; other members
    are ignored.

    Absent arguments are `{}`, unless `required`. Raises Deviation when it is no call, and for
    arguments that are no object.
    """
    members = json_members((yield from json_object(text)))
    arguments = members.get("arguments", members.get("parameters"))
    name = _sendable(members.get("name", ""))
    if not name or (required and arguments is None):
        raise Deviation
    return SpelledCall(name, "{}" if arguments is None else _arguments_object(arguments))


def _sendable(written: str) -> str:
    """The value of a JSON string. Raises Deviation for any other text, and when UTF-8 cannot
    encode the value.
    """
    text = decode_json(written)
    if not isinstance(text, str) or not is_whole(text):
        raise Deviation
    return text
