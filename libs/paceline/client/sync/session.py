# Generated from paceline/client/aio by .ci/client. Do not edit: `make client`.
"""The calls of an agent in one session: generations, rewards, its end."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, Unpack, overload

from paceline.client import calls
from paceline.client.answers import ChatAnswer, Json, OpenedSession, Sample, SessionInfo, Tokens
from paceline.client.deltas import Delta, Joined
from paceline.client.options import ChatOptions, GenerationOptions
from paceline.client.session_calls import SessionCalls, not_ended, turn_of
from paceline.client.sync.wire import SyncWire
from paceline.errors import InvalidInput, PacelineError


class ChatStream:
    """A streamed answer: iterate once over its deltas, then read the whole answer.

    The request is sent with the first delta. Leaving the loop early ends the generation, under
    asyncio at `close` at the latest. For one thread.
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
        """Ends the stream; the gateway stops generating."""
        self._events.close()


class Session(SessionCalls):
    """One attempt at one task; created by a client's `session`, `claim` and `tasks`.

    Threads, or the tasks of one event loop, may share it.

    As a context manager it ends the session at the end of its block. A normal exit calls
    `complete`. KeyboardInterrupt, cancellation and similar exits call `abort`. An exception calls
    `fail`: "infra" for faults of the network or the gateway, else "data". Exceptions propagate to
    the caller. A session without a reward ends "unscored", which is not reward 0.
    """

    def __init__(self, wire: SyncWire, opened: OpenedSession) -> None:
        super().__init__(wire.settings, opened)
        self._wire = wire

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        """Returns one assistant message.

        Raises the errors listed at `Client`; an unknown option is InvalidInput.
        """
        return self._wire.ask(calls.chat(messages, options, self._key))

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> ChatStream:
        """Streams one assistant message during its generation. The deadline covers the whole
        stream.
        """
        call = calls.chat(messages, options, self._key, stream=True)
        return ChatStream(self._wire.events(call))

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Tokens:
        """One completion of token ids (or text), with its ids and log-probs."""
        return self._wire.ask(calls.generate(prompt, options, self._key))

    def reward(
        self,
        value: float,
        *,
        completion: ChatAnswer | Tokens | str | None = None,
        accumulate: bool = False,
    ) -> SessionInfo:
        """Sets the reward of the session, or of the turn of `completion`; with `accumulate`, adds
        to it.

        A repeated call counts once. Raises FailedPrecondition when another reward is already set.
        """
        turn = turn_of(completion)
        return self._wire.ask(calls.reward(self.id, value, turn, accumulate, self._key))

    def info(self) -> SessionInfo:
        """State of the session."""
        return self._wire.ask(calls.session_info(self.id, self._key))

    @overload
    def export(self, form: Literal["tree"] = "tree") -> Json: ...
    @overload
    def export(self, form: Literal["samples"]) -> tuple[Sample, ...]: ...
    def export(self, form: Literal["tree", "samples"] = "tree") -> Json | tuple[Sample, ...]:
        """The session so far, in one of two forms.

        "tree": every turn with tokens, log-probs, versions and rewards. "samples": the samples for
        training. Raises InvalidInput for another form.
        """
        if form == "tree":
            return self._wire.ask(calls.export_tree(self.id, self._key))
        if form == "samples":
            return self._wire.ask(calls.export_samples(self.id, self._key))
        raise InvalidInput("unknown form of an export", seen=repr(form), allowed="tree, samples")

    def complete(self, reward: float | None = None) -> SessionInfo:
        """Ends the session: "final" with a reward, "unscored" without."""
        return self._wire.run(self._end(calls.complete(self.id, reward, self._key)))

    def abort(self) -> SessionInfo:
        """Ends the session; none of its tokens are trained."""
        return self._wire.run(self._end(calls.abort(self.id, self._key)))

    def fail(self, reason: Literal["infra", "data"], message: str = "") -> SessionInfo:
        """Ends a session that could not be completed: "infra", or "data" when the task itself is at
        fault.
        """
        return self._wire.run(self._end(calls.fail(self.id, reason, message, self._key)))
