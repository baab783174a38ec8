"""The errors Paceline raises, one small tree. It does not own their translation to gRPC
(paceline.rpc).

PacelineError
 +-- InvalidInput          the caller sent something that can never work
 |    +-- ConfigError      a setting is unknown, missing or out of range
 |    +-- TrainabilityError  sampling that cannot be trained, in a session that is to be trained
 +-- NotFound              a name that nothing here has
 +-- FailedPrecondition    right call, wrong state
 |    +-- StaleEpoch       a command of an old lease
 |    +-- MissingCapability  this engine cannot do that
 |    +-- WeightsError     a version is unknown, incomplete or out of order
 |    +-- RunFailed        the run is over, and not by its last step
 +-- ResourceExhausted     a budget is spent; try later
 +-- DataLoss              bytes that do not decode or do not match their checksum
 +-- Unavailable           a peer is not there; retried by callers
 +-- DeadlineExceeded      a wait ended without its event
 +-- InternalError         our own fault

Each carries `reason` (UPPER_SNAKE, stable, machine-readable), and `seen` / `allowed` where a value
was wrong. One that passes by itself (ResourceExhausted, Unavailable) may say with `retry_after_s`
when the same call is worth another try.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from paceline.whole_text import whole_text


class PacelineError(Exception):
    """Base of all errors; `str()` is a whole sentence with the value seen and the values
    allowed.
    """

    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        seen: object = None,
        allowed: object = None,
        retry_after_s: float | None = None,  # seconds; None where nobody knows
    ) -> None:
        self.message = whole_text(message)  # it crosses wires and files in UTF-8
        self.retry_after_s = retry_after_s
        self.seen = None if seen is None else whole_text(str(seen))
        self.allowed = None if allowed is None else whole_text(str(allowed))
        if reason is not None:
            self.reason = reason
        super().__init__(self._sentence())

    def within(self, place: object) -> Self:
        """The same error, saying first where it was met."""
        return type(self)(
            f"{place}: {self.message}", reason=self.reason, seen=self.seen, allowed=self.allowed
        )

    def _sentence(self) -> str:
        parts = [self.message]
        if self.seen is not None:
            parts.append(f"seen: {self.seen}")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        return "; ".join(parts)


class InvalidInput(PacelineError):
    """The caller sent something that can never work."""

    reason = "INVALID_INPUT"


class ConfigError(InvalidInput):
    """A setting is unknown, missing or out of range."""

    reason = "CONFIG"


class TrainabilityError(InvalidInput):
    """Sampling that cannot be trained, asked for in a session that is to be trained."""

    reason = "NOT_TRAINABLE"


class NotFound(PacelineError):
    """A name that nothing here has."""

    reason = "NOT_FOUND"


class FailedPrecondition(PacelineError):
    """Right call, wrong state."""

    reason = "FAILED_PRECONDITION"


class StaleEpoch(FailedPrecondition):
    """A command of an old lease."""

    reason = "STALE_EPOCH"


class MissingCapability(FailedPrecondition):
    """This engine cannot do that; the message names engine, capability and setting."""

    reason = "MISSING_CAPABILITY"


class WeightsError(FailedPrecondition):
    """A version is unknown, incomplete or out of order."""

    reason = "WEIGHTS"


class RunFailed(FailedPrecondition):
    """The run is over, and not by its last step; its journal says where, and the same run id takes
    it up again when somebody has seen to the cause.
    """

    reason = "RUN_FAILED"


class ResourceExhausted(PacelineError):
    """A budget is spent; try later."""

    reason = "RESOURCE_EXHAUSTED"


class DataLoss(PacelineError):
    """Bytes that do not decode or do not match their checksum."""

    reason = "DATA_LOSS"


class Unavailable(PacelineError):
    """A peer is not there; retried by callers."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(PacelineError):
    """A wait ended without its event."""

    reason = "DEADLINE_EXCEEDED"


class InternalError(PacelineError):
    """Our own fault."""

    reason = "INTERNAL"


def _below(cls: type[PacelineError]) -> Iterator[type[PacelineError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _below(child)


FAMILIES = {cls.reason: cls for cls in _below(PacelineError)}
"""Reason of a class -> the class: what an error comes back as on the other side of a wire."""
