"""Opens sessions at a gateway, and makes calls outside sessions."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from paceline.client import calls
from paceline.client.aio.opening import awaited_or_entered
from paceline.client.aio.session import AsyncSession
from paceline.client.aio.wire import AsyncWire
from paceline.client.answers import Json, OpenedSession, SessionInfo
from paceline.client.flows import LONG_POLL_S, next_task
from paceline.client.settings import (
    DEADLINE_S,
    GENERATION_DEADLINE_S,
    Backoff,
    ClientSettings,
    verification,
)


class AsyncClient:
    """A gateway's client. One client per process is enough.

    Threads may share `Client` and its sessions, but not a ChatStream. `AsyncClient` has the same
    names, awaitable. It belongs to the event loop of its first call, and tasks of that loop may
    share it.

    `token` is the gateway's; None uses the result of `find_token`. `verify` and `ca` (a PEM file)
    set the trusted authorities of TLS; a context may hold a client certificate. Deadlines are
    seconds for a whole call, including retries and waits.

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
        settings = ClientSettings.of(base_url, token, deadline_s, generation_deadline_s, backoff)
        self._wire = AsyncWire(settings, verification(verify, ca))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wire.settings.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections. Sessions stay open."""
        await self._wire.close()

    @awaited_or_entered  # only async
    async def session(
        self,
        task: str | None = None,
        *,
        group: str | None = None,
        group_size: int | None = None,
        sample_index: int | None = None,
        trainable: bool | None = None,
        turn_discount: float | None = None,
        timeout_s: float | None = None,
        override_sampling: bool | None = None,
    ) -> AsyncSession:
        """Opens a session; as a context manager it also ends the session.

        With asyncio: `async with client.session(...) as session:`, or `await` for the session.

        After `timeout_s` of silence the gateway ends the session. If the answer to the opening is
        lost, another session is opened. The first then ends by that time-out, without turns and so
        without training data. `override_sampling`: True uses the run's sampling when the requested
        sampling cannot be trained, False refuses such requests, None uses the gateway's setting.
        """
        about = {
            "task_id": task,
            "group_id": group,
            "group_size": group_size,
            "sample_index": sample_index,
            "trainable": trainable,
            "turn_discount": turn_discount,
            "timeout_s": timeout_s,
            "override_sampling": override_sampling,
        }
        return self._session(await self._wire.ask(calls.open_session(about)))

    def attach(self, api_key: str) -> AsyncSession:
        """The session of this key, e.g. in a process that received `openai_options()`. Makes no
        call.
        """
        return self._session(calls.current(api_key))

    async def claim(
        self,
        wait_s: float = LONG_POLL_S,
        *,
        session_timeout_s: float | None = None,
        override_sampling: bool | None = None,
    ) -> AsyncSession | None:
        """A session for the next task of the training run; None if none arrives within `wait_s`."""
        opened = await self._wire.ask(calls.claim(wait_s, session_timeout_s, override_sampling))
        return None if opened is None else self._session(opened)

    async def tasks(
        self,
        timeout_s: float = 600.0,
        *,
        session_timeout_s: float | None = None,
        override_sampling: bool | None = None,
    ) -> AsyncIterator[AsyncSession]:
        """Sessions for the tasks of the training run, until none arrives for `timeout_s`, for
        example at the end of the run.

        The caller ends each session: by its block in the loop, or in the thread or task that
        receives it.
        """
        settings, heard = self._wire.settings, False
        while True:
            claim = next_task(
                timeout_s, session_timeout_s, settings, override_sampling, heard=heard
            )
            opened = await self._wire.run(claim)
            if opened is None:
                return
            heard = True
            yield self._session(opened)

    async def session_info(self, session_id: str) -> SessionInfo:
        """State of any session; needs the gateway's token."""
        return await self._wire.ask(calls.session_info(session_id))

    async def reward(
        self, completion_id: str, value: float, *, accumulate: bool = False
    ) -> SessionInfo:
        """Rewards a turn by its completion's id alone, and returns the turn's session."""
        return await self._wire.ask(calls.reward_completion(completion_id, value, accumulate))

    async def models(self) -> tuple[str, ...]:
        """Names of the models served."""
        return await self._wire.ask(calls.models())

    async def health(self) -> Json:
        """{"status": "ok" or "starting", "model", "workers"}."""
        return await self._wire.ask(calls.health())

    def _session(self, opened: OpenedSession) -> AsyncSession:
        return AsyncSession(self._wire, opened)
