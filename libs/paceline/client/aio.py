"""The client for asyncio.

Owns names and signatures; what happens is decided in flows.py and session_calls.py.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from paceline.client import calls
from paceline.client.answers import ChatAnswer, Json, OpenedSession, Sample, SessionInfo, Tokens
from paceline.client.async_wire import AsyncWire
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
from paceline.errors import PacelineError


class AsyncChatStream:
    """A streamed answer: iterate once for its deltas, then ask for the whole.

    The request goes out with the first delta. After leaving the loop early, `close` ends the
    generation at once.
    """

    def __init__(self, events: AsyncGenerator[Json]) -> None:
        self._events = events
        self._joined = Joined()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for event in self._events:
                delta = self._joined.add(event)
                if delta is not None:
                    yield delta
        finally:
            await self.close()

    def answer(self) -> ChatAnswer:
        """All deltas joined. Raises FailedPrecondition (NOT_ENDED) before the last one."""
        return self._joined.answer()

    async def close(self) -> None:
        """End the stream; the gateway stops generating."""
        await self._events.aclose()


class AsyncSession(SessionCalls):
    """`Session`, awaitable.

    Cancelling the task inside its block ends it as KeyboardInterrupt does.
    """

    def __init__(self, wire: AsyncWire, settings: Settings, opened: OpenedSession) -> None:
        super().__init__(settings, opened)
        self._wire = wire

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            if not self._ended:
                await self.complete()
            return
        flow = self._leave(error)
        if flow is None:
            return
        try:
            await self._wire.run(flow)
        except PacelineError as failure:
            error.add_note(not_ended(self, failure))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> ChatAnswer:
        """One assistant message.

        Raises as described at `Client`; an unknown option is InvalidInput.
        """
        return await self._wire.run(ask(self._chat(messages, options), self._settings))

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> AsyncChatStream:
        """One assistant message, as it is generated. The deadline covers the stream to its end."""
        flow = opening(self._chat(messages, options, stream=True), self._settings)
        return AsyncChatStream(self._wire.events(flow))

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Sampling]) -> Tokens:
        """One completion of token ids (or text) with the ids and log-probs that came of it."""
        return await self._wire.run(ask(self._generate(prompt, options), self._settings))

    async def reward(
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
        return await self._wire.run(self._reward(value, completion, accumulate))

    async def info(self) -> SessionInfo:
        """Where the session stands."""
        return await self._wire.run(self._info())

    @overload
    async def export(self, form: Literal["tree"] = "tree") -> Json: ...
    @overload
    async def export(self, form: Literal["samples"]) -> tuple[Sample, ...]: ...
    async def export(self, form: Literal["tree", "samples"] = "tree") -> Json | tuple[Sample, ...]:
        """ "tree": every turn with tokens, log-probs, versions and rewards; "samples": what is or
        would be trained.
        """
        exported: Json | tuple[Sample, ...] = await self._wire.run(self._export(form))
        return exported

    async def complete(self, reward: float | None = None) -> SessionInfo:
        """End the session: "final" with a reward, "unscored" without one."""
        return await self._wire.run(self._complete(reward))

    async def abort(self) -> SessionInfo:
        """End the session; nothing of it is trained."""
        return await self._wire.run(self._abort())

    async def fail(self, reason: Literal["infra", "data"], message: str = "") -> SessionInfo:
        """End the session that could not be played to its end: "infra", or "data" when the task
        itself is at fault.
        """
        return await self._wire.run(self._fail(reason, message))


class OpeningSession:
    """A session about to be opened: `await` it, or enter it with `async with`. Once."""

    def __init__(self, opened: Coroutine[Any, Any, AsyncSession]) -> None:
        self._opened = opened
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, Any, AsyncSession]:
        return self._opened.__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._opened
        return self._session

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.__aexit__(kind, error, trace)


class AsyncClient:
    """`Client` on the running event loop of asyncio: the same names, awaitable, with the same
    deadlines and errors.

    Belongs to the loop of its first call; the tasks of that loop may share it and its sessions.
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
        self._wire = AsyncWire(self._settings, verification(verify, ca))

    def __repr__(self) -> str:
        return f"AsyncClient({self._settings.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Sessions stay as they are."""
        await self._wire.close()

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
    ) -> OpeningSession:
        """Open a session: `async with client.session(...) as session:`, which also ends it, or
        `await` for the session.

        `timeout_s` of silence end it at the gateway. Should the answer to opening be lost, another
        one is opened; the first ends by that time-out, without turns and thus without anything to
        train.
        """
        about = calls.about(
            task, group, group_size, sample_index, trainable, turn_discount, timeout_s
        )
        return OpeningSession(self._opened(about))

    def attach(self, api_key: str) -> AsyncSession:
        """The session that this key belongs to, e.g. in a process that was given
        `openai_options()`. Asks nothing.
        """
        return self._session(calls.current(api_key))

    async def claim(
        self, wait_s: float = LONG_POLL_S, *, session_timeout_s: float | None = None
    ) -> AsyncSession | None:
        """A session for the next task of the training run; None when none came within `wait_s`."""
        opened = await self._wire.run(ask(calls.claim(wait_s, session_timeout_s), self._settings))
        return None if opened is None else self._session(opened)

    async def tasks(
        self, timeout_s: float = 600.0, *, session_timeout_s: float | None = None
    ) -> AsyncIterator[AsyncSession]:
        """Sessions for the tasks of the training run, until none came for `timeout_s`.

        Each is yours to end: `async with session:` in the loop, or in the task that you hand it to.
        """
        while (
            opened := await self._wire.run(next_task(timeout_s, session_timeout_s, self._settings))
        ) is not None:
            yield self._session(opened)

    async def session_info(self, session_id: str) -> SessionInfo:
        """Where any session stands; needs the gateway's token."""
        return await self._wire.run(ask(calls.session_info(session_id), self._settings))

    async def reward(
        self, completion_id: str, value: float, *, accumulate: bool = False
    ) -> SessionInfo:
        """Reward a turn by its completion's id alone; the session that it belongs to."""
        return await self._wire.run(
            ask(calls.reward_completion(completion_id, value, accumulate), self._settings)
        )

    async def models(self) -> tuple[str, ...]:
        """Names of the models served."""
        return await self._wire.run(ask(calls.models(), self._settings))

    async def health(self) -> Json:
        """{"status": "ok" or "starting", "model", "workers"}."""
        return await self._wire.run(ask(calls.health(), self._settings))

    async def _opened(self, about: Json) -> AsyncSession:
        return self._session(await self._wire.run(ask(calls.open_session(about), self._settings)))

    def _session(self, opened: OpenedSession) -> AsyncSession:
        return AsyncSession(self._wire, self._settings, opened)
