"""State of a session, and its end when its block is left; no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import httpx

from paceline.client import calls
from paceline.client.answers import ChatAnswer, OpenedSession, SessionInfo, Task, Tokens
from paceline.client.calls import GatewayCall
from paceline.client.flows import Flow, ending
from paceline.client.settings import ClientSettings
from paceline.client.traces import TraceHeaders
from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    ResourceExhausted,
    Unavailable,
)

CLOSING_S = 5.0
"""Longest time for ending a session when an exception leaves its block."""
ENDED = "SESSION_ENDED"
_INFRA = (
    Unavailable,
    DeadlineExceeded,
    InternalError,
    ResourceExhausted,
    DataLoss,
    OSError,  # connections, time-outs, files
    httpx.TransportError,
)


class SessionCalls:
    """One attempt at one task."""

    id: str
    group_id: str
    task: Task | None
    """The task of a claimed session; None for a session opened by the caller."""

    def __init__(self, settings: ClientSettings, opened: OpenedSession) -> None:
        self.id, self.group_id, self.task = opened.id, opened.group_id, opened.task
        self._settings = settings
        self._key = opened.api_key
        self._ended = False

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(id={self.id!r}, group_id={self.group_id!r}, "
            f"ended={self._ended})"
        )

    @property
    def api_key(self) -> str:
        """The session's key: generations under it belong to this session.

        It permits nothing else.
        """
        return self._key

    @property
    def base_url(self) -> str:
        """Base URL for an ordinary OpenAI client; ends in /v1."""
        return f"{self._settings.base_url}/v1"

    @property
    def ended(self) -> bool:
        """True when this object has ended the session.

        The gateway may have ended it too: call `info`.
        """
        return self._ended

    def openai_options(self) -> dict[str, Any]:
        """Keyword arguments for `openai.OpenAI` or `openai.AsyncOpenAI`. Each request carries the
        trace of the span that is current when it is sent.

        Contains the key: do not log it.
        """
        headers = TraceHeaders()
        return {"api_key": self._key, "base_url": self.base_url, "default_headers": headers}

    def _end(self, call: GatewayCall[SessionInfo]) -> Flow[SessionInfo]:
        info = yield from ending(call, calls.session_info(self.id, self._key), self._settings)
        self._ended = True
        return info

    def _leave(self, error: BaseException) -> Flow[SessionInfo] | None:
        """The flow that ends the session when `error` leaves its block; None when the session has
        ended.
        """
        if self._ended or (isinstance(error, FailedPrecondition) and error.reason == ENDED):
            return None
        deadline_s = min(CLOSING_S, self._settings.deadline_s)
        return self._end(dataclasses.replace(self._verdict(error), deadline_s=deadline_s))

    def _verdict(self, error: BaseException) -> GatewayCall[SessionInfo]:
        # KeyboardInterrupt, CancelledError and SystemExit are no fault of the session.
        if not isinstance(error, Exception):
            if self.task is None:
                return calls.abort(self.id, self._key)
            # Another agent may claim the task.
            return calls.fail(self.id, "infra", type(error).__name__, self._key)
        infra = any(isinstance(one, _INFRA) for one in _causes(error))
        said = f"{type(error).__name__}: {error}"
        return calls.fail(self.id, "infra" if infra else "data", said, self._key)


def turn_of(completion: ChatAnswer | Tokens | str | None) -> str | None:
    """The id of a turn, given as its answer, its tokens or its id."""
    if completion is None or isinstance(completion, str):
        return completion
    return completion.completion_id


def not_ended(session: SessionCalls, failure: Exception) -> str:
    """The note added to the error of a block when the session could not be ended."""
    return f"session {session.id} could not be ended and will time out: {failure}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and the members of groups."""
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if one.__cause__ is not None:
            waiting.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
