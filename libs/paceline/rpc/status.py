"""Errors on the wire, in both directions: google.rpc.Status with one ErrorInfo. The table maps
classes and reasons to codes.

ErrorInfo: reason = the error's own; domain = "paceline"; metadata `family` = reason of its class
(so an error with its own reason is restored as the same class), `seen`, `allowed`, and `trace_id`
of the failed call. Transient errors also carry RetryInfo: their retry_after_s, which the caller's
error has again, or one second by default.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from paceline import errors
from paceline.errors import PacelineError
from paceline.telemetry import current_trace_id

D = TypeVar("D", ErrorInfo, RetryInfo)
DOMAIN = "paceline"
UNAUTHENTICATED = "UNAUTHENTICATED"
NOT_ALLOWED = "NOT_ALLOWED"
REFUSALS = {
    UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
}
"""Reasons for refusing access to a call, with their codes."""
MALFORMED = "MALFORMED"
"""Reason for refusing bytes that are no message of the method."""
_DETAILS_KEY = "grpc-status-details-bin"
_RETRY_AFTER_S = 1.0
_LONGEST_RETRY_S = 3600.0
"""Longest wait accepted from a peer: a broken clock must not cause a sleep of days."""
# A status is sent twice in HTTP/2 headers, 8 KiB in all, and percent-encoded.
_MESSAGE_CHARACTERS, _VALUE_CHARACTERS = 700, 300

_CODES: dict[type[PacelineError], grpc.StatusCode] = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    PacelineError: grpc.StatusCode.INTERNAL,
}
_CLASSES = {code: cls for cls, code in _CODES.items() if cls is not PacelineError}
# Codes from gRPC itself, or from a foreign server.
_FOREIGN: dict[grpc.StatusCode, type[PacelineError]] = {
    **_CLASSES,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidInput,
    grpc.StatusCode.UNAUTHENTICATED: errors.ConfigError,
    grpc.StatusCode.PERMISSION_DENIED: errors.ConfigError,
    grpc.StatusCode.UNIMPLEMENTED: errors.MissingCapability,
    grpc.StatusCode.ABORTED: errors.FailedPrecondition,
    grpc.StatusCode.ALREADY_EXISTS: errors.FailedPrecondition,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.UNKNOWN: errors.InternalError,
    # Paceline's servers describe their own faults in detail, so this is gRPC's: a connection broke
    # during a call.
    grpc.StatusCode.INTERNAL: errors.Unavailable,
}


def code_of(error: PacelineError) -> grpc.StatusCode:
    """The gRPC code of an error: the code of its nearest class in the table."""
    if error.reason in REFUSALS:
        return REFUSALS[error.reason]
    return next(_CODES[cls] for cls in type(error).__mro__ if cls in _CODES)


def status_of(error: PacelineError) -> Status:
    """The error as a google.rpc.Status; long texts are cut to fit the headers."""
    family = next(
        (
            cls.reason
            for cls in type(error).__mro__
            if errors.FAMILIES.get(getattr(cls, "reason", "")) is cls
        ),
        "",
    )
    facts = {
        "family": family,
        "seen": error.seen,
        "allowed": error.allowed,
        "trace_id": current_trace_id(),
    }
    info = ErrorInfo(reason=error.reason, domain=DOMAIN)
    for name, value in facts.items():
        if value or (value is not None and name in ("seen", "allowed")):
            info.metadata[name] = _cut(value, _VALUE_CHARACTERS)
    parts: list[ErrorInfo | RetryInfo] = [info]
    if isinstance(error, (errors.Unavailable, errors.ResourceExhausted)):
        parts.append(RetryInfo(retry_delay=_duration(error.retry_after_s)))
    details = [Any() for _ in parts]
    for detail, one in zip(details, parts, strict=True):
        detail.Pack(one)
    return Status(
        code=code_of(error).value[0],
        message=_cut(error.message, _MESSAGE_CHARACTERS),
        details=details,
    )


def error_from_rpc(error: grpc.aio.AioRpcError) -> PacelineError:
    """The error that the server raised, as the same class; for a foreign error, the class for its
    code. A request that arrived unparsable is DataLoss.
    """
    message = error.details() or f"the call failed with {error.code().name}"
    details = _details(error)
    info, retry = _detail(details, ErrorInfo), _detail(details, RetryInfo)
    retry_after_s = None if retry is None else _seconds(retry.retry_delay)
    if info is not None and info.domain == DOMAIN:
        facts = info.metadata
        known = _CLASSES.get(error.code(), errors.InternalError)
        family = errors.FAMILIES.get(facts.get("family", ""), known)
        if info.reason == MALFORMED:
            family = errors.DataLoss
        seen, allowed = facts.get("seen"), facts.get("allowed")
        return family(
            message, reason=info.reason, seen=seen, allowed=allowed, retry_after_s=retry_after_s
        )

    family = _FOREIGN.get(error.code(), errors.InternalError)
    own = error.code() in _CODES.values()
    return family(message, reason=None if own else error.code().name, retry_after_s=retry_after_s)


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Turns gRPC errors inside the block into PacelineErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                return list(Status.FromString(value).details)
            except DecodeError:
                return []  # The peer's details are malformed; the code still gives the class.
    return []


def _detail(details: list[Any], kind: type[D]) -> D | None:
    """The first detail of a kind."""
    for detail in details:
        found = kind()
        try:
            if detail.Unpack(found):
                return found
        except DecodeError:
            continue
    return None


def _duration(seconds: float | None) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(
        round(1000 * _bounded(_RETRY_AFTER_S if seconds is None else seconds))
    )
    return duration


def _seconds(duration: Duration) -> float:
    return _bounded(duration.seconds + duration.nanos / 1e9)


def _bounded(seconds: float) -> float:
    """Within [0, an hour]; the default for a value that is no number."""
    return min(max(seconds, 0.0), _LONGEST_RETRY_S) if seconds == seconds else _RETRY_AFTER_S


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
