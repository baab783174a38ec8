"""Lets a call be awaited for a session, or entered as its block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec

from paceline.client.aio.session import AsyncSession

P = ParamSpec("P")


class OpeningSession:
    """A session to be opened: `await` it, or enter it with `async with`, once."""

    def __init__(self, opened: Coroutine[Any, Any, AsyncSession]) -> None:
        self._opened = opened
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, Any, AsyncSession]:
        return self._opened.__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._opened
        return self._session

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._session is not None
        await self._session.__aexit__(kind, error, trace)


def awaited_or_entered(
    call: Callable[P, Coroutine[Any, Any, AsyncSession]],
) -> Callable[P, OpeningSession]:
    """Decorates a method that opens a session."""

    @functools.wraps(call)
    def opening(*args: P.args, **kwargs: P.kwargs) -> OpeningSession:
        return OpeningSession(call(*args, **kwargs))

    return opening
