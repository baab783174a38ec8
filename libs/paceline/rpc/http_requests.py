"""Checks HTTP requests for every service: their site, key, size and fields; and converts errors to
statuses.

On loopback a service trusts every client, and a page in its user's browser can reach it too. Such a
page may use its own name that resolves to loopback (DNS rebinding): its Host is foreign. Or it
sends a request without a preflight: its Origin is foreign.
"""

import asyncio
import reprlib
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline import errors
from paceline.rpc import names_loopback
from paceline.telemetry import get_logger

ERRORS: tuple[tuple[str | type[errors.PacelineError], int, str], ...] = (
    ("UNAUTHENTICATED", 401, "authentication_error"),
    ("NOT_ALLOWED", 403, "permission_error"),
    ("MODEL_NOT_FOUND", 404, "invalid_request_error"),
    ("BODY_TIMEOUT", 408, "invalid_request_error"),
    ("BODY_TOO_LARGE", 413, "invalid_request_error"),
    ("UNSUPPORTED_MEDIA_TYPE", 415, "invalid_request_error"),
    ("OTHER_GATEWAY", 421, "invalid_request_error"),
    (errors.InvalidInput, 400, "invalid_request_error"),
    (errors.MissingCapability, 400, "invalid_request_error"),
    (errors.NotFound, 404, "not_found_error"),
    (errors.FailedPrecondition, 409, "invalid_request_error"),
    (errors.ResourceExhausted, 429, "rate_limit_error"),
    (errors.Unavailable, 503, "server_error"),
    (errors.DeadlineExceeded, 504, "server_error"),
    (errors.PacelineError, 500, "server_error"),
)
"""(reason or class of an error, HTTP status, OpenAI's type); the first row that fits counts."""
BODY_DEADLINE_S = 30.0
"""Maximum seconds until a body is complete."""
SHOWN_CHARACTERS = 100
_SEEN = reprlib.Repr()
_SEEN.maxstring = _SEEN.maxother = SHOWN_CHARACTERS
_log = get_logger(__name__)
Answer = Callable[[errors.PacelineError, Request], Response]
Handler = Callable[[Request, Any], Awaitable[Response]]


class FieldError(errors.InvalidInput):
    """A wrong field of the body."""

    def __init__(self, field: str, message: str, **about: Any) -> None:
        """`about`: seen, allowed, reason of the error."""
        super().__init__(f"{field}: {message}", **about)
        self.field = field


def status_of(error: errors.PacelineError) -> tuple[int, str]:
    """(status, OpenAI's error type)"""
    return next(
        (status, name)
        for key, status, name in ERRORS
        if (key == error.reason if isinstance(key, str) else isinstance(error, key))
    )


def error_handlers(answer: Answer) -> dict[type[Exception], Handler]:
    """Starlette's handlers, which answer each error, also a path or method that is not served, and
    an internal fault. The traceback of a fault is logged, not sent.
    """

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, errors.PacelineError):
            return answer(error, request)
        if not isinstance(error, HTTPException):
            _log.error("a request failed", path=request.url.path, exc_info=error)
            error = errors.InternalError("the service failed; its log has the cause")
            return answer(error, request)
        kinds = {404: "no such path", 405: "the path does not take this method"}
        text = kinds.get(error.status_code, error.detail)
        seen = f"{request.method} {request.url.path}"[:200]
        answered = answer(errors.NotFound(text, seen=seen), request)
        answered.status_code = error.status_code
        answered.headers.update(error.headers or {})
        return answered

    return dict.fromkeys((errors.PacelineError, HTTPException, Exception), handle)


def check_site(request: Request, *, loopback: bool, origins: Collection[str] | None = None) -> None:
    """Raises InvalidInput (NOT_ALLOWED) for a foreign Host on loopback, and for a foreign Origin.

    `origins`: sites with access besides the service's own; "*" allows all; None: no page at all.
    """
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if loopback and not names_loopback(host):
        message = "the Host header names another machine than this one"
        seen, allowed = host, "localhost or a loopback address"
    elif origin is None:
        return
    elif origins is None:
        message, seen, allowed = "a web page sent this request", origin, "no Origin"
    elif "*" in origins or origin in origins:
        return
    elif origin.partition("://")[2].lower() != host.lower():
        message = "the page of another site sent this request"
        seen, allowed = origin, f"the origin {host}, or none"
    else:
        return
    raise errors.InvalidInput(message, reason="NOT_ALLOWED", seen=seen[:100], allowed=allowed)


def api_key(request: Request) -> str:
    """The key of a request: OpenAI's bearer token, or Anthropic's x-api-key.

    Raises InvalidInput (UNAUTHENTICATED) for two tokens.
    """
    if len(request.headers.getlist("authorization")) > 1:
        message = "the request carries two tokens: a proxy has put its own beside the caller's"
        seen = "two headers authorization"
        allowed = "the caller's alone (SGLang's router: started without --api-key)"
        raise errors.InvalidInput(message, reason="UNAUTHENTICATED", seen=seen, allowed=allowed)
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_body(
    request: Request, most: int, take: Callable[[bytes, int], None] = lambda part, size: None
) -> bytes:
    """The body. `take` gets each part as it arrives, and the size so far.

    Raises InvalidInput above `most` bytes, before the body is read whole, and for a late body.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    message, allowed = "the body is too large", f"{most} bytes"
                    reason, seen = "BODY_TOO_LARGE", f"over {allowed}"
                    raise errors.InvalidInput(message, reason=reason, seen=seen, allowed=allowed)
                take(part, size)
                parts.append(part)
    except TimeoutError as error:
        message, reason = "the body was not there in time", "BODY_TIMEOUT"
        seen, allowed = f"{size} bytes", f"the whole of it in {BODY_DEADLINE_S:g} s"
        raise errors.InvalidInput(message, reason=reason, seen=seen, allowed=allowed) from error
    return b"".join(parts)


@contextmanager
def field_errors() -> Iterator[None]:
    """A block that raises FieldError with the first wrong field, in place of pydantic's error."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        given = first.get("input")
        if isinstance(given, str | bytes):  # do not spell out megabytes
            given = given[:SHOWN_CHARACTERS]
        seen = _SEEN.repr(given)[:SHOWN_CHARACTERS]
        raise FieldError(_spelled(first["loc"]), str(first["msg"]), seen=seen) from None


def _spelled(loc: tuple[Any, ...]) -> str:
    """The path of a field, as in messages[0].content. Leaves out a union's branch that pydantic
    tried, and a wrong key.
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
