"""Defines Paceline's errors as one small tree. paceline.rpc translates them to gRPC.

PacelineError
 +-- InvalidInput          the caller sent input that can never work
 |    +-- ConfigError      a setting is unknown, missing or out of range
 |    +-- TrainabilityError  sampling settings that cannot be trained, in a training session
 +-- NotFound              the name does not exist
 +-- FailedPrecondition    the call is valid, but not in the current state
 |    +-- StaleEpoch       a command carries an old lease epoch
 |    +-- MissingCapability  the engine lacks a capability
 |    +-- WeightsError     a version is unknown, incomplete or out of order
 |    +-- RunFailed        the run ended before its last step
 +-- ResourceExhausted     a budget is exhausted; try later
 +-- DataLoss              bytes do not decode or do not match their checksum
 +-- Unavailable           a peer is unreachable; callers retry
 +-- DeadlineExceeded      a wait ended without its event
 +-- InternalError         a fault of Paceline itself

Each error carries `reason` (UPPER_SNAKE, stable, machine-readable), and `seen` / `allowed` if a
value was wrong. A temporary error (ResourceExhausted, Unavailable) may carry `retry_after_s`, the
seconds until a retry is useful.
"""

import re
from collections.abc import Iterator
from typing import Self

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A surrogate in a Python string is always unpaired, because a pair is one character. UTF-8 cannot
encode it. It may come from a JSON escape.
"""


def whole_text(text: str) -> str:
    """The text, with U+FFFD in place of each unpaired surrogate."""
    return text if is_whole(text) else LONE_SURROGATE.sub("\ufffd", text)


def is_whole(text: str) -> bool:
    """Whether UTF-8 can encode the text."""
    return text.isascii() or LONE_SURROGATE.search(text) is None


class PacelineError(Exception):
    """Base of all errors; `str()` is a sentence with the value seen and the values allowed."""

    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        seen: object = None,
        allowed: object = None,
        retry_after_s: float | None = None,  # seconds; None if unknown
    ) -> None:
        self.message = whole_text(message)  # the text is sent and stored as UTF-8
        self.retry_after_s = retry_after_s
        self.seen = None if seen is None else whole_text(str(seen))
        self.allowed = None if allowed is None else whole_text(str(allowed))
        if reason is not None:
            self.reason = reason
        values = (("seen", self.seen), ("allowed", self.allowed))
        given = [f"{name}: {value}" for name, value in values if value is not None]
        super().__init__("; ".join([self.message, *given]))

    def within(self, place: object) -> Self:
        """The same error with the place of the failure in front of its message."""
        return type(self)(
            f"{place}: {self.message}", reason=self.reason, seen=self.seen, allowed=self.allowed
        )


class InvalidInput(PacelineError):
    """The caller sent input that can never work."""

    reason = "INVALID_INPUT"


class ConfigError(InvalidInput):
    """A setting is unknown, missing or out of range."""

    reason = "CONFIG"


class TrainabilityError(InvalidInput):
    """The session is for training, but its sampling settings cannot be trained."""

    reason = "NOT_TRAINABLE"


class NotFound(PacelineError):
    """The name does not exist."""

    reason = "NOT_FOUND"


class FailedPrecondition(PacelineError):
    """The call is valid, but not in the current state."""

    reason = "FAILED_PRECONDITION"


class StaleEpoch(FailedPrecondition):
    """A command carries an old lease epoch."""

    reason = "STALE_EPOCH"


class MissingCapability(FailedPrecondition):
    """The engine lacks a capability. The message names engine, capability and setting."""

    reason = "MISSING_CAPABILITY"


class WeightsError(FailedPrecondition):
    """A version is unknown, incomplete or out of order."""

    reason = "WEIGHTS"


class RunFailed(FailedPrecondition):
    """The run ended before its last step. Its journal records the position. After the cause is
    fixed, the same run id resumes the run.
    """

    reason = "RUN_FAILED"


class ResourceExhausted(PacelineError):
    """A budget is exhausted; try later."""

    reason = "RESOURCE_EXHAUSTED"


class DataLoss(PacelineError):
    """Bytes do not decode or do not match their checksum."""

    reason = "DATA_LOSS"


class Unavailable(PacelineError):
    """A peer is unreachable; callers retry."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(PacelineError):
    """A wait ended without its event."""

    reason = "DEADLINE_EXCEEDED"


class InternalError(PacelineError):
    """A fault of Paceline itself."""

    reason = "INTERNAL"


def _below(cls: type[PacelineError]) -> Iterator[type[PacelineError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _below(child)


FAMILIES = {cls.reason: cls for cls in _below(PacelineError)}
"""Error class by its `reason`. A client rebuilds a received error from this table."""
