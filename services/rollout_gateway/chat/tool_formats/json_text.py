"""Reads JSON from growing text.

A scanner finds the end of an object, and the standard library decodes the whole object. Values are
returned as the model's exact text: parsing and writing them anew would change numbers and spaces.
"""

import itertools
import json
import re
from typing import Any

from paceline.errors import is_whole
from paceline.services.rollout_gateway.chat.tool_formats import base

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
        raise base.Deviation from error
    brackets = re.findall(r"[\[\]{}]", _STRING.sub("", text))
    depths = itertools.accumulate(1 if one in "[{" else -1 for one in brackets)
    if max(depths, default=0) > DEEPEST:
        raise base.Deviation
    return value


def json_object(text: base.GrowingText) -> base.Reading[str]:
    """Reads one JSON object and returns its text. Raises Deviation for any other text."""
    yield from text.blanks()
    start, depth = text.mark(), 0
    if (yield from text.peek()) != "{":
        raise base.Deviation
    while True:
        following = yield from text.peek()
        if following == '"':
            yield from _string(text)
        elif following and following in "{}[]":
            text.take()
            depth += 1 if following in "{[" else -1
            if depth > DEEPEST:
                raise base.Deviation
        elif not (yield from text.run(_BETWEEN)):
            raise base.Deviation
        if not depth:
            whole = text.since(start)
            decode_json(whole)
            return whole


def _string(text: base.GrowingText) -> base.Reading[str]:
    """Reads a string and returns its text. Its escapes are checked with the whole object."""
    start = text.mark()
    yield from text.expect('"')
    while True:
        yield from text.run(_PLAIN)
        if (yield from text.skip('"')):
            return text.since(start)
        if not (yield from text.skip("\\")) or not (yield from text.peek()):
            raise base.Deviation
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


def json_arguments(text: base.GrowingText) -> base.Reading[str]:
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
        written = _sendable(written).strip(base.BLANK)
        decode_json(written)
    if not written.startswith("{"):
        raise base.Deviation
    return written


def call_object(
    text: base.GrowingText, *, required: bool = False
) -> base.Reading[base.SpelledCall]:
    """Reads a call written as an object with "name", and "arguments" or "parameters"; other members
    are ignored.

    Absent arguments are `{}`, unless `required`. Raises Deviation when it is no call, and for
    arguments that are no object.
    """
    members = json_members((yield from json_object(text)))
    arguments = members.get("arguments", members.get("parameters"))
    name = _sendable(members.get("name", ""))
    if not name or (required and arguments is None):
        raise base.Deviation
    return base.SpelledCall(name, "{}" if arguments is None else _arguments_object(arguments))


def _sendable(written: str) -> str:
    """The value of a JSON string. Raises Deviation for any other text, and when UTF-8 cannot
    encode the value.
    """
    text = decode_json(written)
    if not isinstance(text, str) or not is_whole(text):
        raise base.Deviation
    return text
