"""Request bodies: bounded, checked, and what is wrong with them by field. Owns no schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from paceline.errors import InvalidInput

MAX_BODY_BYTES = 8 << 20
SEEN_CHARACTERS = 100
B = TypeVar("B", bound=BaseModel)


class FieldError(InvalidInput):
    """A field of the body is wrong."""

    def __init__(self, field: str, message: str, *, seen: object, allowed: object = None) -> None:
        super().__init__(f"{field}: {message}", seen=seen, allowed=allowed)
        self.field = field


async def read(request: Request, kind: type[B]) -> B:
    """The body, checked.

    Raises InvalidInput naming the first wrong field, when it is too large, or no JSON by its type.
    """
    raw = await _bytes(request)
    if raw:
        _check_type(request)
    return parse(kind, raw)


def parse(kind: type[B], raw: bytes | Mapping[str, object]) -> B:
    """A body from JSON or from its fields. An empty one has none. Raises FieldError."""
    try:
        if isinstance(raw, Mapping):
            return kind.model_validate(raw)
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        seen = repr(first.get("input"))[:SEEN_CHARACTERS]
        raise FieldError(_spelled(first["loc"]), str(first["msg"]), seen=seen) from error


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


async def _bytes(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise InvalidInput(
                "the body is too large",
                reason="BODY_TOO_LARGE",
                seen=f"over {MAX_BODY_BYTES} bytes",
                allowed=f"{MAX_BODY_BYTES} bytes",
            )
        parts.append(part)
    return b"".join(parts)
