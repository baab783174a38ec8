"""Reads JSON from growing text, strictly and without recursion.

Values are returned as the model's exact text: parsing and writing them anew would change numbers
and spaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from paceline.services.rollout_gateway.chat.tool_formats import base
from paceline.whole_text import is_whole

DEEPEST = 100
"""Deepest nesting of objects and arrays, since later readers of the arguments (clients, templates)
recurse.
"""

_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORDS = {"t": "true", "f": "false", "n": "null"}
_CLOSING = {"{": "}", "[": "]"}


def json_value(text: base.GrowingText) -> base.Reading[str]:
    """Reads one JSON value and returns its text.

    Raises Deviation at the first character that cannot be JSON.
    """
    start = text.mark()
    open_: list[str] = []  # closing brackets still needed, the outermost first
    while True:
        opened = yield from text.peek()
        if opened in ("{", "["):
            text.take()
            open_.append(_CLOSING[opened])
            if len(open_) > DEEPEST:
                raise base.Deviation
            yield from text.blanks()
            if (yield from text.peek()) != open_[-1]:
                if opened == "{":
                    yield from _key(text)
                continue
        else:
            yield from _scalar(text)
        if not (yield from _comma(text, open_)):
            return text.since(start)


def json_members(text: base.GrowingText) -> base.Reading[dict[str, str]]:
    """Reads one JSON object and returns the texts of its members; of equal keys the last counts, as
    in `json`.

    Raises Deviation at the first character that cannot be JSON.
    """
    yield from text.expect("{")
    members: dict[str, str] = {}
    yield from text.blanks()
    if (yield from text.at("}")):
        text.take()
        return members
    open_ = ["}"]
    while open_:
        key = yield from _key(text)
        members[key] = yield from json_value(text)
        yield from text.blanks()
        if (yield from text.peek()) == ",":
            text.take()
            yield from text.blanks()
        else:
            yield from text.expect(open_.pop())

    return members


def json_arguments(text: base.GrowingText) -> base.Reading[str]:
    """Reads the arguments of a call: a JSON object, or a JSON string that contains one.

    Returns the text of the object. Raises Deviation for every other value.
    """
    if (yield from text.peek()) not in ("{", '"'):
        raise base.Deviation
    return arguments_object((yield from json_value(text)))


def arguments_object(written: str) -> str:
    """The object of a call's arguments, from the text of a JSON value; a string is unwrapped.
    Raises Deviation for any other value.
    """
    if written.startswith('"'):
        written = _held_object(str(json.loads(written)))
    if not written.startswith("{"):
        raise base.Deviation
    return written


def _held_object(inner: str) -> str:
    """The JSON object inside a string. Raises Deviation for every other string."""
    check_json(inner.strip(base.BLANK))
    return _sendable(inner.strip(base.BLANK))


def check_json(whole: str) -> None:
    """Raises Deviation for a text that is not one JSON value of depth at most DEEPEST."""
    text = base.GrowingText()
    text.push(whole)
    text.ended = True
    next(_only_value(text), None)


def _only_value(text: base.GrowingText) -> base.Reading[None]:
    yield from json_value(text)
    yield from text.expect_end()


def call_object(
    text: base.GrowingText, argument_keys: Sequence[str], *, required: bool = False
) -> base.Reading[base.SpelledCall]:
    """Reads a call written as an object with "name" and one of `argument_keys`; other members are
    ignored.

    Absent arguments are `{}`, unless `required`. Raises Deviation when it is no call, and for
    arguments that are no object.
    """
    members = yield from json_members(text)
    arguments = next((members[key] for key in argument_keys if key in members), None)
    if "name" not in members or (required and arguments is None):
        raise base.Deviation
    name = _name(members["name"])
    return base.SpelledCall(name, "{}" if arguments is None else arguments_object(arguments))


def _comma(text: base.GrowingText, open_: list[str]) -> base.Reading[bool]:
    """After a value, closes finished objects and arrays.

    Returns True when a comma and the key of the next value have been read.
    """
    while open_:
        yield from text.blanks()
        if (yield from text.peek()) == ",":
            text.take()
            yield from text.blanks()
            if open_[-1] == "}":
                yield from _key(text)
            return True
        yield from text.expect(open_.pop())
    return False


def _key(text: base.GrowingText) -> base.Reading[str]:
    """A key with its colon, up to the value."""
    key = yield from _string(text)
    yield from text.blanks()
    yield from text.expect(":")
    yield from text.blanks()
    return str(json.loads(key))


def _scalar(text: base.GrowingText) -> base.Reading[None]:
    first = yield from text.peek()
    if first == '"':
        yield from _string(text)
    elif first in _WORDS:
        yield from text.expect(_WORDS[first])
    elif not _NUMBER.fullmatch((yield from text.run(_NUMBER_CHARACTERS))):
        raise base.Deviation


def _string(text: base.GrowingText) -> base.Reading[str]:
    start = text.mark()
    yield from text.expect('"')
    while True:
        yield from text.run(_PLAIN)
        if (yield from text.at('"')):
            text.take()
            return text.since(start)
        yield from text.expect("\\")
        escaped = yield from text.peek()
        if escaped not in tuple('"\\/bfnrtu'):
            raise base.Deviation
        text.take()
        for _ in range(4 if escaped == "u" else 0):
            if (yield from text.peek()) not in tuple("0123456789abcdefABCDEF"):
                raise base.Deviation
            text.take()


def _name(written: str) -> str:
    """Name of a tool from its JSON text. Raises Deviation for a name that cannot be sent."""
    if not written.startswith('"'):
        raise base.Deviation
    name = _sendable(str(json.loads(written)))
    if not name:
        raise base.Deviation
    return name


def _sendable(text: str) -> str:
    """The text itself. Raises Deviation when UTF-8 cannot encode it."""
    if not is_whole(text):
        raise base.Deviation
    return text
