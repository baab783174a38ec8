"""The blocking client behind awaitable names, so that one test body runs over both.

Calls run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any

from paceline.client import Client, Session

_END = object()


class InThread:
    """Wraps a Client or a Session: calls become awaitable, blocks and loops asynchronous."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return repr(self.inner)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name == "openai" or not callable(value):
            return value
        if name == "tasks":
            return lambda *args, **kwargs: _each(value(*args, **kwargs))
        if name in ("attach", "openai_options"):
            return lambda *args, **kwargs: _wrapped(value(*args, **kwargs))

        async def call(*args: Any, **kwargs: Any) -> Any:
            return _wrapped(await asyncio.to_thread(value, *args, **kwargs))

        return call

    async def __aenter__(self) -> Any:
        await asyncio.to_thread(self.inner.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.inner.__exit__, kind, error, trace)


async def in_either(owner: Any, ask: Callable[[Any], Any]) -> Any:
    """Return the result of a call on `owner.openai`, for a client or a session of either kind."""
    if isinstance(owner, InThread):
        return await asyncio.to_thread(ask, owner.openai)
    return await ask(owner.openai)


def _wrapped(value: Any) -> Any:
    return InThread(value) if isinstance(value, Client | Session) else value


async def _each(inner: Iterator[Any]) -> AsyncIterator[Any]:
    while (one := await asyncio.to_thread(next, inner, _END)) is not _END:
        yield _wrapped(one)
