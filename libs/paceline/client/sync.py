"""The synchronous client.

Owns names and signatures; what happens is decided in flows.py and session_calls.py.
"""

from __future__ import annotations

import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from paceline.client import calls
from paceline.client.answers import ChatAnswer, Json, OpenedSession, Sample, SessionInfo, Tokens
from paceline.client.claims import LONG_POLL_S, next_task
from paceline.client.deltas import Delta, Joined
from paceline.client.flows import ask, opening
from paceline.client.options import ChatOptions, Sampling
from paceline.client.session_calls import SessionCalls, not_ended
from paceline.client.settings import (
    DEADLINE_S,
    GENERATION_DEADLINE_S,
    Backoff,
    Settings,
    verification,
)
from paceline.client.sync_wire import SyncWire
from paceline.errors import PacelineError


class ChatStream:
    """A streamed answer: iterate once for its deltas, then ask for the whole.

    The request goes out with the first delta. Leaving the loop early ends the generation. For one
    thread.
    """

    def __init__(self, events: Generator[Json]) -> None:
        self._events = events
        self._joined = Joined()

    def __iter__(self) -> Iterator[Delta]:
        try:
            for event in self._events:
                delta = self._joined.add(event)
                if delta is not None:
                    yield delta
        finally:
            self.close()

    def answer(self) -> ChatAnswer:
        """All deltas joined. Raises FailedPrecondition (NOT_ENDED) before the last one."""
        return self._joined.answer()

    def close(self) -> None:
        """End the stream; the gateway stops generating."""
        self._events.close()


class Session(SessionCalls):
    """One attempt at one task; made by `Client.session` and `Client.tasks`. May be shared between
    threads.

    As a context manager it ends the session when its block is left: `complete` normally, `abort` by
    KeyboardInterrupt and other exits, `fail` by an exception: "infra" for what the network or the
    gateway did, else "data". Exceptions go on to the caller. A session without a reward ends
    "unscored", which is not reward 0.
    """

    def __init__(self, wire: SyncWire, settings: Settings, opened: OpenedSession) -> None:
        super().__init__(settings, opened)
        self._wire = wire

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            if not self._ended:
                self.complete()
            return
        flow = self._leave(error)
        if flow is None:
            return
        try:
            self._wire.run(flow)
        except PacelineError as failure:
            error.add_note(not_ended(self, failure))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> ChatAnswer:
        """One assistant message.

        Raises as described at `Client`; an unknown option is InvalidInput.
        """
        return self._wire.run(ask(self._chat(messages, options), self._settings))

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> ChatStream:
        """One assistant message, as it is generated. The deadline covers the stream to its end."""
        flow = opening(self._chat(messages, options, stream=True), self._settings)
        return ChatStream(self._wire.events(flow))

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Sampling]) -> Tokens:
        """One completion of token ids (or text) with the ids and log-probs that came of it."""
        return self._wire.run(ask(self._generate(prompt, options), self._settings))

    def reward(
        self,
        value: float,
        *,
        completion: ChatAnswer | Tokens | str | None = None,
        accumulate: bool = False,
    ) -> SessionInfo:
        """Give the session, or the turn of `completion`, its reward; with `accumulate`, add to it.

        Counts once however often it is sent. Raises FailedPrecondition when there is another reward
        already.
        """
        return self._wire.run(self._reward(value, completion, accumulate))

    def info(self) -> SessionInfo:
        """Where the session stands."""
        return self._wire.run(self._info())

    @overload
    def export(self, form: Literal["tree"] = "tree") -> Json: ...
    @overload
    def export(self, form: Literal["samples"]) -> tuple[Sample, ...]: ...
    def export(self, form: Literal["tree", "samples"] = "tree") -> Json | tuple[Sample, ...]:
        """ "tree": every turn with tokens, log-probs, versions and rewards; "samples": what is or
        would be trained.
        """
        exported: Json | tuple[Sample, ...] = self._wire.run(self._export(form))
        return exported

    def complete(self, reward: float | None = None) -> SessionInfo:
        """End the session: "final" with a reward, "unscored" without one."""
        return self._wire.run(self._complete(reward))

    def abort(self) -> SessionInfo:
        """End the session; nothing of it is trained."""
        return self._wire.run(self._abort())

    def fail(self, reason: Literal["infra", "data"], message: str = "") -> SessionInfo:
        """End the session that could not be played to its end: "infra", or "data" when the task
        itself is at fault.
        """
        return self._wire.run(self._fail(reason, message))


class Client:
    """A gateway's client. One for a process is enough: threads may share it and its sessions, not a
    ChatStream.

    `token` is the gateway's; None reads $PACELINE_TOKEN. `verify` and `ca` (a PEM file) say whom
    TLS trusts; a context may hold a certificate of your own. Deadlines are seconds for a whole
    call, retries and waits included.

    Calls raise errors of `paceline.errors`: InvalidInput (UNAUTHENTICATED for a wrong key),
    NotFound, FailedPrecondition (SESSION_ENDED, ...), ResourceExhausted, Unavailable,
    InternalError, DeadlineExceeded, DataLoss.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        generation_deadline_s: float = GENERATION_DEADLINE_S,
        verify: bool | ssl.SSLContext = True,
        ca: str | Path | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._settings = Settings.of(base_url, token, deadline_s, generation_deadline_s, backoff)
        self._wire = SyncWire(self._settings, verification(verify, ca))

    def __repr__(self) -> str:
        return f"Client({self._settings.base_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Sessions stay as they are."""
        self._wire.close()

    def session(
        self,
        task: str | None = None,
        *,
        group: str | None = None,
        group_size: int | None = None,
        sample_index: int | None = None,
        trainable: bool | None = None,
        turn_discount: float | None = None,
        timeout_s: float | None = None,
    ) -> Session:
        """Open a session now; use it as a context manager to end it.

        `timeout_s` of silence end it at the gateway. Should the answer to opening be lost, another
        one is opened; the first ends by that time-out, without turns and thus without anything to
        train.
        """
        about = calls.about(
            task, group, group_size, sample_index, trainable, turn_discount, timeout_s
        )
        return self._session(self._wire.run(ask(calls.open_session(about), self._settings)))

    def attach(self, api_key: str) -> Session:
        """The session that this key belongs to, e.g. in a process that was given
        `openai_options()`. Asks nothing.
        """
        return self._session(calls.current(api_key))

    def claim(
        self, wait_s: float = LONG_POLL_S, *, session_timeout_s: float | None = None
    ) -> Session | None:
        """A session for the next task of the training run; None when none came within `wait_s`."""
        opened = self._wire.run(ask(calls.claim(wait_s, session_timeout_s), self._settings))
        return None if opened is None else self._session(opened)

    def tasks(
        self, timeout_s: float = 600.0, *, session_timeout_s: float | None = None
    ) -> Iterator[Session]:
        """Sessions for the tasks of the training run, until none came for `timeout_s`.

        Each is yours to end: `with session:` in the loop, or in the thread that you hand it to.
        """
        while (
            opened := self._wire.run(next_task(timeout_s, session_timeout_s, self._settings))
        ) is not None:
            yield self._session(opened)

    def session_info(self, session_id: str) -> SessionInfo:
        """Where any session stands; needs the gateway's token."""
        return self._wire.run(ask(calls.session_info(session_id), self._settings))

    def reward(self, completion_id: str, value: float, *, accumulate: bool = False) -> SessionInfo:
        """Reward a turn by its completion's id alone; the session that it belongs to."""
        return self._wire.run(
            ask(calls.reward_completion(completion_id, value, accumulate), self._settings)
        )

    def models(self) -> tuple[str, ...]:
        """Names of the models served."""
        return self._wire.run(ask(calls.models(), self._settings))

    def health(self) -> Json:
        """{"status": "ok" or "starting", "model", "workers"}."""
        return self._wire.run(ask(calls.health(), self._settings))

    def _session(self, opened: OpenedSession) -> Session:
        return Session(self._wire, self._settings, opened)
