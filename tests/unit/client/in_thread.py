"""The synchronous client behind awaitable names, so that one test body runs over both.

Calls run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any

from paceline.client import ChatStream, Client, Session

_END = object()


class InThread:
    """Wraps a Client, a Session or a ChatStream: calls become awaitable, blocks and loops
    asynchronous.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._iterator: Any = (
            None  # kept: it must not be closed by the garbage collection of another thread
        )

    def __repr__(self) -> str:
        return repr(self._inner)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value) or (isinstance(self._inner, ChatStream) and name == "answer"):
            return value
        if name == "session":
            return lambda *args, **kwargs: Opening(lambda: value(*args, **kwargs))
        if name == "tasks":
            return lambda *args, **kwargs: _each(value(*args, **kwargs))
        if name == "close" and self._iterator is not None:
            return lambda: asyncio.to_thread(self._iterator.close)
        if name in ("chat_stream", "attach", "openai_options"):
            return lambda *args, **kwargs: _wrapped(value(*args, **kwargs))

        async def call(*args: Any, **kwargs: Any) -> Any:
            return _wrapped(await asyncio.to_thread(value, *args, **kwargs))

        return call

    async def __aenter__(self) -> Any:
        await asyncio.to_thread(self._inner.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._inner.__exit__, kind, error, trace)

    async def __aiter__(self) -> AsyncIterator[Any]:
        self._iterator = iter(self._inner)
        async for one in _each(self._iterator):
            yield one


class Opening:
    """What `session(...)` gives: awaitable, and a block."""

    def __init__(self, opened: Callable[[], Session]) -> None:
        self._opened = opened
        self._session: InThread | None = None

    async def _open(self) -> InThread:
        return InThread(await asyncio.to_thread(self._opened))

    def __await__(self) -> Any:
        return self._open().__await__()

    async def __aenter__(self) -> InThread:
        self._session = await self._open()
        return self._session

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.__aexit__(kind, error, trace)


def _wrapped(value: Any) -> Any:
    return InThread(value) if isinstance(value, Client | Session | ChatStream) else value


async def _each(inner: Iterator[Any]) -> AsyncIterator[Any]:
    while (one := await asyncio.to_thread(next, inner, _END)) is not _END:
        yield _wrapped(one)
