"""Converts errors to HTTP answers in the formats of OpenAI and Anthropic, with their status
codes.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from paceline.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidInput,
    MissingCapability,
    NotFound,
    PacelineError,
    ResourceExhausted,
    Unavailable,
)
from paceline.services.rollout_gateway.calls.checks import CHECKED_FIELDS
from paceline.services.rollout_gateway.sessions.names import OTHER_GATEWAY, OtherGateway

STATUS = (
    (InvalidInput, 400, "invalid_request_error"),
    (MissingCapability, 400, "invalid_request_error"),
    (NotFound, 404, "not_found_error"),
    (FailedPrecondition, 409, "invalid_request_error"),
    (ResourceExhausted, 429, "rate_limit_error"),
    (Unavailable, 503, "server_error"),
    (DeadlineExceeded, 504, "server_error"),
)
REASONS = {
    "UNAUTHENTICATED": (401, "authentication_error"),
    "NOT_ALLOWED": (403, "permission_error"),
    "BODY_TIMEOUT": (408, "invalid_request_error"),
    "BODY_TOO_LARGE": (413, "invalid_request_error"),
    "UNSUPPORTED_MEDIA_TYPE": (415, "invalid_request_error"),
    OTHER_GATEWAY: (421, "invalid_request_error"),
    "MODEL_NOT_FOUND": (404, "invalid_request_error"),
}
ANTHROPIC_TYPES = {
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
}
PROMPTS = {"/v1/chat/completions": "messages", "/v1/responses": "input"}
"""Each path's name of the prompt field."""
RETRY_STATUSES = (429, 503)
GATEWAY_HEADER = "x-paceline-gateway"
"""Header with the number of the gateway that has a session; a load balancer routes by it."""


def status_of(error: PacelineError) -> tuple[int, str]:
    """(status, OpenAI's error type)"""
    if error.reason in REASONS:
        return REASONS[error.reason]
    return next(
        ((code, name) for family, code, name in STATUS if isinstance(error, family)),
        (500, "server_error"),
    )


def openai_error(error: PacelineError, path: str = "") -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; param is the wrong field. path: of the
    request; it determines the name of the prompt field.
    """
    field = getattr(error, "field", None)
    if field is None:
        field = _checked_field(error.message)
        field = PROMPTS.get(path, field) if field == "prompt" else field
    return {
        "error": {
            "message": str(error),
            "type": status_of(error)[1],
            "param": field,
            "code": error.reason.lower(),
        }
    }


def _checked_field(message: str) -> str | None:
    """The field at the start of a refusal by calls/checks.py."""
    first = message.partition(" ")[0].rstrip(":")
    return first if first in CHECKED_FIELDS else None


def anthropic_error(error: PacelineError) -> dict[str, Any]:
    """{"type": "error", "error": {"type", "message"}}"""
    status, kind = status_of(error)
    if kind == "server_error":
        kind = "api_error"
    return {
        "type": "error",
        "error": {"type": ANTHROPIC_TYPES.get(status, kind), "message": str(error)},
    }


def answer(error: PacelineError, request: Request) -> JSONResponse:
    """The response, with retry-after (s) if a retry may help. `x-should-retry` keeps the clients of
    OpenAI and Anthropic from repeating any other request; some of those have begun.
    """
    status, _ = status_of(error)
    headers = {"x-should-retry": "true" if status in RETRY_STATUSES else "false"}
    if status in RETRY_STATUSES:
        headers["retry-after"] = str(
            max(math.ceil(getattr(error, "retry_after_s", None) or 1.0), 1)
        )
    if isinstance(error, OtherGateway):
        headers[GATEWAY_HEADER] = str(error.gateway)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    path = request.url.path
    anthropic = path.startswith("/v1/messages")
    body = anthropic_error(error) if anthropic else openai_error(error, path)
    spelled = getattr(request.state, "spelled", {})
    if (field := body["error"].get("param")) in spelled:
        message = body["error"]["message"].removeprefix(field)
        body["error"] |= {"param": spelled[field], "message": f"{spelled[field]}{message}"}
    return JSONResponse(body, status_code=status, headers=headers)
