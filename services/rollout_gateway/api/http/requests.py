"""Reads a request: its key, the name of its model, and its body under limits.

A body is refused while it arrives if it could exceed the model's context. It is also refused if
checking its values would delay other requests.
"""

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request

from paceline.errors import InvalidInput, NotFound
from paceline.rpc.http_requests import SHOWN_CHARACTERS, api_key, field_errors, read_body
from paceline.services.rollout_gateway.api.http.shapes import Shape
from paceline.services.rollout_gateway.background import LargeRequests
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.sessions import session


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves a request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def caller_of(request: Request) -> session.Caller:
    """The caller of a request.

    Raises InvalidInput (UNAUTHENTICATED), FailedPrecondition for the key of an ended session.
    """
    return await gateway_of(request).agents.caller(api_key(request))


async def require_token(request: Request) -> None:
    """Raises InvalidInput for the key of a session, which only gives access to that session."""
    if (await caller_of(request)).session is not None:
        message, allowed = "a session's key cannot do this", "the gateway's token"
        raise InvalidInput(message, reason="NOT_ALLOWED", allowed=allowed)


ANY = "*"
"""Configured name that accepts every model name."""


class ModelNotFound(NotFound):
    """A model that is not served."""

    reason = "MODEL_NOT_FOUND"
    field = "model"


def model_names(gateway: Gateway) -> Sequence[str]:
    """The model's own name first, then the names of gateway.api.model_names."""
    return (gateway.model, *(name for name in gateway.config.api.model_names if name != ANY))


def check_model(gateway: Gateway, name: str | None) -> None:
    """Raises ModelNotFound for any other name than the served names and the configured model
    directory. None or an empty name selects the served model.
    """
    names, config = model_names(gateway), gateway.config
    if not name or name in (config.model, *names) or ANY in config.api.model_names:
        return
    raise ModelNotFound("the model is not served here", seen=name[:100], allowed=", ".join(names))


MAX_BODY_BYTES = 8 << 20
LEAST_BODY_BYTES, TOKEN_BYTES = 1 << 20, 64
"""Maximum bytes of a body: a base, plus bytes for each token of the model's context."""
MAX_OBJECTS, LEAST_VALUES = 8192, 32_768
"""Maximum objects in a body, and base of the maximum of other values. Two more values are allowed
per token of the model's context.
"""
OUTLINE_BYTES = 64 << 10
"""Bytes of a body that are outlined at a time; a body above this size counts as large."""
B = TypeVar("B", bound=Shape)


class Outline:
    """Counts the values of a JSON text as its bytes arrive, so that its cost is bounded before
    parsing.

    The content of strings does not count. After invalid JSON the counts may be wrong; parsing fails
    there anyway.
    """

    def __init__(self, longest: int) -> None:
        """`longest`: tokens of the model's context."""
        self._most_values = LEAST_VALUES + 2 * longest
        self._values = self._objects = 0
        self._in_text = False
        self._escape = b""

    def add(self, part: bytes) -> None:
        """Add the next bytes. Raises InvalidInput above the maximum of values."""
        plain = (self._escape + part).replace(b"\\\\", b"")
        self._escape = b"\\" if plain.endswith(b"\\") else b""
        stretches = plain.removesuffix(self._escape).replace(b'\\"', b"").split(b'"')
        outside = b"".join(stretches[self._in_text :: 2])
        self._in_text ^= len(stretches) % 2 == 0
        objects = outside.count(b"{")
        self._objects += objects
        self._values += objects + outside.count(b"[") + outside.count(b",")
        most_of = {"objects": MAX_OBJECTS, "values": self._most_values}
        for what, seen in {"objects": self._objects, "values": self._values}.items():
            most = most_of[what]
            if seen > most:
                message, found = f"the body holds too many {what}", f"{seen} or more"
                raise InvalidInput(message, reason="BODY_TOO_LARGE", seen=found, allowed=most)


def most_bytes(longest: int) -> int:
    """Maximum bytes of a request for a model with `longest` tokens of context, far more than that
    context needs.
    """
    return min(LEAST_BODY_BYTES + TOKEN_BYTES * longest, MAX_BODY_BYTES)


async def read(request: Request, kind: type[B]) -> B:
    """Read and check the body.

    Sets `request.state`: `body_bytes` is its size, `ignored` its ignored fields, `spelled` the
    names of fields that errors call otherwise. Raises InvalidInput with the first wrong field, when
    the body is too large, slow or not JSON by its type; ResourceExhausted when too many large
    bodies are in progress.
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


def judged(kind: type[B], raw: bytes) -> tuple[B, tuple[str, ...]]:
    """Check a body; returns it with its harmless fields that are not served. Empty bytes mean no
    fields. Raises FieldError.
    """
    with field_errors():
        body = kind.model_validate_json(raw or b"{}")
    return body, kind.undeclared.judge(body)


def _check_type(request: Request) -> None:
    """Refuse media types that a page's form can send to another site without a preflight."""
    media = request.headers.get("content-type", "")
    if media.partition(";")[0].strip().lower() != "application/json":
        message, reason = "the body has another media type", "UNSUPPORTED_MEDIA_TYPE"
        seen, allowed = media[:SHOWN_CHARACTERS], "Content-Type: application/json"
        raise InvalidInput(message, reason=reason, seen=seen or "no Content-Type", allowed=allowed)


async def received(request: Request, longest: int, aside: LargeRequests) -> bytes:
    """The bytes of a body for a model with `longest` tokens of context. Raises InvalidInput when
    the body is too large or slow, ResourceExhausted when too many large bodies are in progress.
    """
    outline, held = Outline(longest), 0

    def take(part: bytes, size: int) -> None:
        nonlocal held
        outline.add(part)
        if size > OUTLINE_BYTES:
            aside.hold(size - held)
            held = size

    try:
        return await read_body(request, most_bytes(longest), take)
    finally:
        aside.free(held)
