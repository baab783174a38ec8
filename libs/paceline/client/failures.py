"""Errors of paceline.errors from answers, by a table of HTTP statuses."""

from __future__ import annotations

import json
from typing import Any

from paceline import errors
from paceline.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidInput,
    NotFound,
    PacelineError,
    ResourceExhausted,
    Unavailable,
)

UNAUTHENTICATED = "UNAUTHENTICATED"
_BY_STATUS: dict[int, type[PacelineError]] = {
    404: NotFound,
    408: DeadlineExceeded,
    409: FailedPrecondition,
    421: FailedPrecondition,
    429: ResourceExhausted,
    502: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}
_BY_TYPE = {  # OpenAI's names, for errors inside a stream, which have no status
    "invalid_request_error": 400,
    "authentication_error": 401,
    "not_found_error": 404,
    "rate_limit_error": 429,
}
_SHOWN = 300


def error_of(status: int, body: bytes) -> PacelineError:
    """The error for an answer of this status. A foreign body is quoted."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    return _error(status, said, body)


def error_in_stream(event: dict[str, Any]) -> PacelineError:
    """The error of a streamed event {"error": ...}."""
    said = event.get("error")
    kind = said.get("type") if isinstance(said, dict) else None
    return _error(_BY_TYPE.get(str(kind), 500), event, json.dumps(event).encode())


def _error(status: int, said: Any, body: bytes) -> PacelineError:
    detail = said.get("error") if isinstance(said, dict) else None
    if not isinstance(detail, dict) or not isinstance(detail.get("message"), str):
        quoted = body[:_SHOWN].decode(errors="replace")
        reason = UNAUTHENTICATED if status == 401 else None
        return _family(status)(
            f"HTTP {status} without the gateway's error body", reason=reason, seen=repr(quoted)
        )
    code = detail.get("code")
    reason = code.upper() if isinstance(code, str) and code else None
    if status == 401:
        reason = UNAUTHENTICATED
    # The class with this reason, which the gateway raised; otherwise the class of the status.
    kind = errors.FAMILIES.get(reason or "", _family(status))
    return kind(detail["message"], reason=reason)


def _family(status: int) -> type[PacelineError]:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return InternalError if status >= 500 else InvalidInput
