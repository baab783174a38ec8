"""Request bodies: bounded, checked, and what is wrong with them by field. Owns no schema.

A body is refused while it arrives where it could hold more than the model reads, or more values
than can be checked without holding everybody up.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.api.http.keys import gateway_of
from paceline.services.rollout_gateway.api.http.shapes import OpenShape
from paceline.services.rollout_gateway.calls.aside import LargeRequests

MAX_BODY_BYTES = 8 << 20
LEAST_BODY_BYTES, TOKEN_BYTES = 1 << 20, 64
"""A body may have so many bytes, and so many more for each token that the model reads."""
MAX_OBJECTS, LEAST_VALUES = 8192, 32_768
"""Objects in a body at most; other values at most, besides two for each token that the model reads.
"""
BODY_DEADLINE_S = 30.0
"""Seconds until a body is whole."""
OUTLINE_BYTES = 64 << 10
"""Of a body that are outlined at a time, where it is there at once; also what a body may have
before it counts among the large ones.
"""
SEEN_CHARACTERS = 100
B = TypeVar("B", bound=OpenShape)
_SEEN = reprlib.Repr()
_SEEN.maxstring = _SEEN.maxother = SEEN_CHARACTERS


class FieldError(InvalidInput):
    """A field of the body is wrong."""

    def __init__(self, field: str, message: str, *, seen: object, allowed: object = None) -> None:
        super().__init__(f"{field}: {message}", seen=seen, allowed=allowed)
        self.field = field


class Outline:
    """Counts the values of a JSON text as its bytes come: what it costs is known before it is read.

    What stands in texts does not count. Bytes that are no JSON may be counted wrong from where they
    are none; nobody reads on there.
    """

    def __init__(self, longest: int) -> None:
        """`longest`: tokens that the model reads."""
        self._most_values = LEAST_VALUES + 2 * longest
        self._values = self._objects = 0
        self._in_text = False
        self._escape = b""

    def add(self, part: bytes) -> None:
        """The next bytes. Raises InvalidInput when there are too many values."""
        plain = (self._escape + part).replace(b"\\\\", b"")
        self._escape = b"\\" if plain.endswith(b"\\") else b""
        stretches = plain.removesuffix(self._escape).replace(b'\\"', b"").split(b'"')
        outside = b"".join(stretches[self._in_text :: 2])
        self._in_text ^= len(stretches) % 2 == 0
        objects = outside.count(b"{")
        self._objects += objects
        self._values += objects + outside.count(b"[") + outside.count(b",")
        for what, seen, most in (
            ("objects", self._objects, MAX_OBJECTS),
            ("values", self._values, self._most_values),
        ):
            if seen > most:
                raise InvalidInput(
                    f"the body holds too many {what}",
                    reason="BODY_TOO_LARGE",
                    seen=f"{seen} or more",
                    allowed=most,
                )


def most_bytes(longest: int) -> int:
    """Of a request at most, for a model that reads `longest` tokens: far more than these need."""
    return min(LEAST_BODY_BYTES + TOKEN_BYTES * longest, MAX_BODY_BYTES)


async def read(request: Request, kind: type[B]) -> B:
    """The body, checked; its size is noted in `request.state.body_bytes`, what of it is ignored in
    `request.state.ignored`, fields that it spells otherwise than errors do in
    `request.state.spelled`.

    Raises InvalidInput naming the first wrong field, when it is too large or slow, or no JSON by
    its type; ResourceExhausted when too many large ones are under way.
    """
    gateway = gateway_of(request)
    raw = await received(request, gateway.router.ready.max_sequence_tokens, gateway.aside)
    if raw:
        _check_type(request)
    request.state.body_bytes = len(raw)
    body, ignored = await gateway.aside.run(len(raw), lambda: judged(kind, raw))
    request.state.ignored = ignored
    request.state.spelled = getattr(body, "spelled", {})
    return body


def judged(kind: type[B], raw: bytes | Mapping[str, object]) -> tuple[B, tuple[str, ...]]:
    """A body from JSON or from its fields, and what of it is harmless and not served. An empty one
    has none. Raises FieldError or UnknownField.
    """
    try:
        if isinstance(raw, Mapping):
            body = kind.model_validate(raw)
        else:
            body = kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        given = first.get("input")
        if isinstance(given, str | bytes):  # of megabytes, nobody spells all
            given = given[:SEEN_CHARACTERS]
        seen = _SEEN.repr(given)[:SEEN_CHARACTERS]
        raise FieldError(_spelled(first["loc"]), str(first["msg"]), seen=seen) from None
    return body, kind.beyond.judge(body)


def parse(kind: type[B], raw: bytes | Mapping[str, object]) -> B:
    """The same, without what is harmless."""
    return judged(kind, raw)[0]


def _spelled(loc: tuple[Any, ...]) -> str:
    """messages[0].content; the branch of a union that pydantic tried is left out, and so is a wrong
    key.
    """
    text = ""
    if loc[-1:] == ("[key]",):
        loc = loc[:-2]
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            text += f".{part}" if text else part
    return text or "body"


def _check_type(request: Request) -> None:
    """Refuses what a page's form can send to another site without asking first."""
    media = request.headers.get("content-type", "")
    if media.partition(";")[0].strip().lower() != "application/json":
        raise InvalidInput(
            "the body has another media type",
            reason="UNSUPPORTED_MEDIA_TYPE",
            seen=media[:SEEN_CHARACTERS] or "no Content-Type",
            allowed="Content-Type: application/json",
        )


async def received(request: Request, longest: int, aside: LargeRequests) -> bytes:
    """The bytes of a body for a model that reads `longest` tokens. Raises InvalidInput when it is
    too large or slow, ResourceExhausted when too many large ones are under way.
    """
    most = most_bytes(longest)
    outline, parts, size, held = Outline(longest), [], 0, 0
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise InvalidInput(
                        "the body is too large",
                        reason="BODY_TOO_LARGE",
                        seen=f"over {most} bytes",
                        allowed=f"{most} bytes",
                    )
                outline.add(part)
                parts.append(part)
                if size > OUTLINE_BYTES:
                    aside.hold(size - held)
                    held = size
    except TimeoutError as error:
        raise InvalidInput(
            "the body was not there in time",
            reason="BODY_TIMEOUT",
            seen=f"{size} bytes",
            allowed=f"the whole of it in {BODY_DEADLINE_S:g} s",
        ) from error
    finally:
        aside.free(held)
    return b"".join(parts)
