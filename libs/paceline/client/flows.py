"""Decides attempts, waits and deadlines, and the meaning of a lost answer, without I/O.

A flow is a generator. It yields an action (`Send`, `Pause`), receives the action's outcome, and
returns the result. The synchronous and the asynchronous client run the same flows, without
decisions of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias, TypeVar

from paceline.client import calls
from paceline.client.answers import Json, OpenedSession, SessionInfo, documented_shape
from paceline.client.calls import GatewayCall
from paceline.client.failures import error_of
from paceline.client.settings import Backoff, ClientSettings, check_seconds
from paceline.client.traces import trace_headers
from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    PacelineError,
    Unavailable,
)

T = TypeVar("T")
REFUSED_UNBEGUN = (429, 503)
"""Statuses with which the gateway refuses a call before starting it."""
LOST_ON_THE_WAY = (502, 504)
"""Statuses of a proxy that lost the answer: the gateway may have carried out the call."""
LONG_POLL_S = 30.0
LATE_S = 10.0
"""Seconds that a gateway which has answered before may take beyond a wait."""
EARLY_S = 1.0
"""Seconds before repeating a claim that the gateway answered with "no task" without waiting."""


@dataclass(frozen=True, slots=True)
class Send:
    """Makes one attempt, in at most `left_s` seconds."""

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    content: bytes | None = field(repr=False)
    left_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Waits."""

    seconds: float


GATEWAY = "x-paceline-gateway"
"""Header of an answer 421: the number of the right gateway. A load balancer routes by it."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A received answer. A stream with status 200 has an empty body here."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """A lost answer. `sent`: the request may have reached the gateway. `late`: the
    deadline passed.
    """

    sent: bool
    late: bool
    cause: Exception
    hopeless: bool = False  # another attempt would end the same way


Step: TypeAlias = Send | Pause
Outcome: TypeAlias = HttpAnswer | Lost | None
Flow: TypeAlias = Generator[Step, Outcome, T]


@dataclass(slots=True)
class Attempts:
    """The attempts of one call so far."""

    call: GatewayCall[Any]
    deadline_s: float
    backoff: Backoff
    number: int = 0
    doubt: bool = False  # an answer was lost: the gateway may have carried out the call
    earlier: PacelineError | None = None  # error of the previous attempt
    gateway: str = ""  # number of the gateway that has the group or session, once known

    def wait_s(self, outcome: HttpAnswer | Lost) -> float | None:
        """Seconds until the next attempt; None: no further attempt."""
        if isinstance(outcome, Lost):
            self.doubt |= outcome.sent
            again = not (outcome.late or outcome.hopeless) and (
                self.call.repeatable or not outcome.sent
            )
            return self.backoff.wait_s(self.number, None) if again else None
        self.doubt |= outcome.status in LOST_ON_THE_WAY
        again = outcome.status in REFUSED_UNBEGUN or (
            self.call.repeatable and outcome.status in LOST_ON_THE_WAY
        )
        return self.backoff.wait_s(self.number, retry_after_s(outcome.headers)) if again else None

    def error(self, outcome: HttpAnswer | Lost) -> PacelineError:
        """The error for the caller after the last attempt."""
        error = (
            self._lost(outcome)
            if isinstance(outcome, Lost)
            else error_of(outcome.status, outcome.body)
        )
        said = "" if isinstance(outcome, Lost) else f" answered {outcome.status}"
        error.add_note(
            f"{self.call.method} {self.call.path}{said}, attempt {self.number}, deadline "
            f"{self.deadline_s} s"
        )
        if self.earlier is not None:
            error.add_note(f"the attempt before: {self.earlier}")
        return error

    def _lost(self, outcome: Lost) -> PacelineError:
        error: PacelineError
        why = f"{type(outcome.cause).__name__}: {outcome.cause}"
        if outcome.late:
            error = DeadlineExceeded(
                "no answer from the gateway in time", seen=why, allowed=f"{self.deadline_s} s"
            )
        elif outcome.sent:
            error = Unavailable(
                "the connection to the gateway broke off", reason="CONNECTION_LOST", seen=why
            )
        else:
            error = Unavailable("no connection to the gateway", reason="NO_CONNECTION", seen=why)
        error.__cause__ = outcome.cause
        return error


def ask(call: GatewayCall[T], settings: ClientSettings) -> Flow[T]:
    """Sends until there is an answer, and reads it.

    Raises the gateway's error; Unavailable when the gateway cannot be reached; DeadlineExceeded
    when the deadline passed during a wait for an answer; DataLoss for an unreadable answer.
    """
    answer = yield from answered(_attempts(call, settings), settings)
    return _read(call, answer)


def ending(
    call: GatewayCall[SessionInfo], look: GatewayCall[SessionInfo], settings: ClientSettings
) -> Flow[SessionInfo]:
    """Ends a session.

    If an answer was lost but the session has ended as requested, its state is the answer.
    """
    attempts = _attempts(call, settings)
    try:
        answer = yield from answered(attempts, settings)
    except FailedPrecondition:
        if not attempts.doubt:
            raise
        info = yield from ask(look, settings)
        if info.state not in call.ends_as:
            raise
        return info
    return _read(call, answer)


def opening(call: GatewayCall[Any], settings: ClientSettings) -> Flow[None]:
    """Sends until a stream begins; the driver keeps the stream."""
    yield from answered(_attempts(call, settings), settings)


def next_task(
    timeout_s: float,
    session_timeout_s: float | None,
    settings: ClientSettings,
    override_sampling: bool | None = None,
    *,
    heard: bool = False,
) -> Flow[OpenedSession | None]:
    """A session for the next task; None if none arrives for `timeout_s`.

    `heard`: the gateway has answered before. If it is then away, its run has ended or it is
    restarting, and there is no task. Raises as `ask`.
    """
    clock = settings.backoff.clock
    end = clock() + check_seconds("timeout_s", timeout_s)
    while (asked := clock()) < end:
        wait_s = min(LONG_POLL_S, end - asked)
        claim = calls.claim(wait_s, session_timeout_s, override_sampling)
        if heard:
            claim = replace(claim, deadline_s=end - asked + LATE_S)
        try:
            opened = yield from ask(claim, settings)
        except (Unavailable, DeadlineExceeded):
            if not heard:
                raise
            opened = None
        heard = True
        if opened is not None:
            return opened
        early = asked + min(EARLY_S, wait_s) - clock()
        if early > 0:
            yield Pause(early)
    return None


def answered(attempts: Attempts, settings: ClientSettings) -> Flow[HttpAnswer]:
    """Repeats attempts until one succeeds. Raises as `ask`."""
    call, clock = attempts.call, attempts.backoff.clock
    content = call.content()
    end = clock() + attempts.deadline_s
    while True:
        attempts.number += 1
        headers = _headers(call, settings)  # a run that begins meanwhile has a token
        if attempts.gateway:
            headers[GATEWAY] = attempts.gateway
        outcome = yield Send(call.method, call.path, headers, content, max(end - clock(), 0.001))
        assert outcome is not None
        if isinstance(outcome, HttpAnswer) and outcome.status in (200, 201, *call.accepts):
            return outcome
        gateway = outcome.headers.get(GATEWAY) if isinstance(outcome, HttpAnswer) else None
        if gateway is not None and not attempts.gateway:
            attempts.gateway = gateway
            continue
        wait = attempts.wait_s(outcome)
        error = attempts.error(outcome)
        if wait is None or clock() + wait >= end:
            raise error
        attempts.earlier = error
        yield Pause(wait)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds in Retry-After, as a number or a date; None if it is absent or unreadable."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


def _attempts(call: GatewayCall[Any], settings: ClientSettings) -> Attempts:
    default = settings.generation_deadline_s if call.slow else settings.deadline_s
    deadline_s = (
        default + call.extra_s
        if call.deadline_s is None
        else check_seconds("deadline_s", call.deadline_s)
    )
    return Attempts(call, deadline_s, settings.backoff)


def _headers(call: GatewayCall[Any], settings: ClientSettings) -> dict[str, str]:
    key = call.key or settings.current_token
    headers = {"accept": "application/json", **trace_headers()}
    if key:
        headers["authorization"] = f"Bearer {key}"
    if call.body is not None:
        headers["content-type"] = "application/json"
    return headers


def _read(call: GatewayCall[T], answer: HttpAnswer) -> T:
    with documented_shape():
        return call.read(None if answer.status == 204 else _json(answer))


def _json(answer: HttpAnswer) -> Json:
    try:
        data = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise DataLoss("the answer is not JSON", seen=repr(answer.body[:200])) from error
    if not isinstance(data, dict):
        raise DataLoss("the answer is not a JSON object", seen=repr(answer.body[:200]))
    return data
