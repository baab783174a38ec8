"""What a session is and asks, for both clients.

Owns how a block's end becomes an end of the session; no I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import httpx

from paceline.client import calls
from paceline.client.answers import ChatAnswer, OpenedSession, SessionInfo, Task, Tokens
from paceline.client.calls import Call
from paceline.client.flows import Flow, ask, ending
from paceline.client.settings import Settings
from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidInput,
    ResourceExhausted,
    Unavailable,
)

CLOSING_S = 5.0
"""Longest time that ending a session takes when its block is left by an exception."""
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
    """What to do, of a claimed session; None for one that the caller opened."""

    def __init__(self, settings: Settings, opened: OpenedSession) -> None:
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
        """The session's key: what is generated under it belongs to this session.

        It may do nothing else.
        """
        return self._key

    @property
    def base_url(self) -> str:
        """Of an ordinary OpenAI client; ends in /v1."""
        return f"{self._settings.base_url}/v1"

    @property
    def ended(self) -> bool:
        """True when this object has ended the session.

        The gateway may have ended it too: ask `info`.
        """
        return self._ended

    def openai_options(self) -> dict[str, str]:
        """Keyword arguments for `openai.OpenAI` or `openai.AsyncOpenAI`.

        Holds the key: do not log it.
        """
        return {"api_key": self._key, "base_url": self.base_url}

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        stream: bool = False,
    ) -> Call[ChatAnswer]:
        return calls.chat(messages, options, self._key, stream=stream)

    def _generate(self, prompt: str | Sequence[int], options: Mapping[str, Any]) -> Call[Tokens]:
        return calls.generate(prompt, options, self._key)

    def _reward(
        self, value: float, completion: ChatAnswer | Tokens | str | None, accumulate: bool
    ) -> Flow[SessionInfo]:
        turn = (
            completion
            if isinstance(completion, str) or completion is None
            else completion.completion_id
        )
        return ask(calls.reward(self.id, value, turn, accumulate, self._key), self._settings)

    def _info(self) -> Flow[SessionInfo]:
        return ask(calls.session_info(self.id, self._key), self._settings)

    def _export(self, form: str) -> Flow[Any]:
        if form == "tree":
            return ask(calls.export_tree(self.id, self._key), self._settings)
        if form == "samples":
            return ask(calls.export_samples(self.id, self._key), self._settings)
        raise InvalidInput("unknown form of an export", seen=repr(form), allowed="tree, samples")

    def _complete(self, reward: float | None = None) -> Flow[SessionInfo]:
        return self._end(calls.complete(self.id, reward, self._key), ("final", "unscored"))

    def _abort(self) -> Flow[SessionInfo]:
        return self._end(calls.abort(self.id, self._key), ("aborted",))

    def _fail(self, reason: Literal["infra", "data"], message: str) -> Flow[SessionInfo]:
        return self._end(calls.fail(self.id, reason, message, self._key), ("failed",))

    def _end(self, call: Call[SessionInfo], states: tuple[str, ...]) -> Flow[SessionInfo]:
        look = calls.session_info(self.id, self._key)
        info = yield from ending(call, look, states, self._settings)
        self._ended = True
        return info

    def _leave(self, error: BaseException) -> Flow[SessionInfo] | None:
        """How the session ends when its block is left by `error`; None when it has ended."""
        if self._ended or (isinstance(error, FailedPrecondition) and error.reason == ENDED):
            return None
        call, states = self._verdict(error)
        deadline_s = min(CLOSING_S, self._settings.deadline_s)
        return self._end(dataclasses.replace(call, deadline_s=deadline_s), states)

    def _verdict(self, error: BaseException) -> tuple[Call[SessionInfo], tuple[str, ...]]:
        if not isinstance(
            error, Exception
        ):  # KeyboardInterrupt, CancelledError, SystemExit: nobody's fault
            if self.task is None:
                return calls.abort(self.id, self._key), ("aborted",)
            return calls.fail(self.id, "infra", type(error).__name__, self._key), (
                "failed",
            )  # others may claim it
        reason: Literal["infra", "data"] = (
            "infra" if any(isinstance(one, _INFRA) for one in _causes(error)) else "data"
        )
        return calls.fail(self.id, reason, f"{type(error).__name__}: {error}", self._key), (
            "failed",
        )


def not_ended(session: SessionCalls, failure: Exception) -> str:
    """The note on the error that left a block when the session could not be ended."""
    return f"session {session.id} could not be ended and will time out: {failure}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and the members of groups."""
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
