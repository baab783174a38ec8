"""Hosts that join a service by a stream of its own server, say what becomes of their processes, and
do what they are told: both ends of such a stream, whatever the processes are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from paceline.config import SecurityConfig
from paceline.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    PacelineError,
    Unavailable,
)
from paceline.rpc.channel import channel, wait_ready
from paceline.rpc.status import rpc_errors

_FIRST_WORD_S = 10.0
News = TypeVar("News", bound=Message)
Order = TypeVar("Order", bound=Message)


class HostStream(Generic[News, Order]):
    """The service's end of one stream of a host."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[News | None] = asyncio.Queue()
        """What it says; ends with None when the stream is over."""
        self._orders: asyncio.Queue[Order | None] = asyncio.Queue()

    def order(self, order: Order) -> None:
        """Tells the host to do it."""
        self._orders.put_nowait(order)

    def close(self) -> None:
        """Ends the stream, and with it the host's processes."""
        self._orders.put_nowait(None)

    async def orders(self, requests: AsyncIterator[News]) -> AsyncGenerator[Order]:
        """What to tell, as long as the host speaks."""
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self.close())
        try:
            while (order := await self._orders.get()) is not None:
                yield order
        finally:
            reading.cancel()
            self.heard.put_nowait(None)

    async def _read(self, requests: AsyncIterator[News]) -> None:
        async for request in requests:
            self.heard.put_nowait(request)


async def first_word(requests: AsyncIterator[Any]) -> Any:
    """Who joins, as its request says. Raises DeadlineExceeded, InvalidInput."""
    try:
        async with asyncio.timeout(_FIRST_WORD_S):
            async for request in requests:
                return request.joined
    except TimeoutError as error:
        raise DeadlineExceeded("a host says nothing", seen=f"{_FIRST_WORD_S} s") from error
    raise InvalidInput("a host says who it is first", seen="nothing")


def check_same(host: int, own: Mapping[str, str], there: Mapping[str, str], what: str) -> None:
    """Raises ConfigError where a host has something else than the service of `what`."""
    names = sorted({*own, *there})
    if differ := [name for name in names if own.get(name) != there.get(name)]:
        raise ConfigError(
            f"host {host} has other settings or versions than the service of its {what}",
            reason="HOST_DIFFERS",
            seen=", ".join(differ),
            allowed="the same on all hosts",
        )


class JoinedHost(Generic[News, Order]):
    """The host's end, for one service after another."""

    def __init__(self, method: Callable[[grpc.aio.Channel], Any], what: str) -> None:
        """`method`: the call by which it joins; `what`: its processes, in words."""
        self._method = method
        self._what = what
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self.waiting_bytes = 0
        """Of what has been said and is not on its way yet."""

    def say(self, news: News) -> None:
        """Tells the service, after what was said before."""
        self.waiting_bytes += news.ByteSize()
        self._news.put_nowait(news)

    async def hold(
        self,
        joined: News,
        address: str,
        security: SecurityConfig,
        connect_s: float,
        obey: Callable[[Order, asyncio.TaskGroup], Awaitable[None]],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        """Joins the service there and does what it says until it is gone; raises why. `obey` may
        leave work in the group, whose failure ends the stream; `on_end` is awaited at the end.
        """
        async with channel(address, security) as peer:
            await wait_ready(peer, connect_s)
            self._news, self.waiting_bytes = asyncio.Queue(), 0
            self.say(joined)
            call = self._method(peer)
            try:
                async with asyncio.TaskGroup() as tasks:
                    # The one writer: grpc.aio cancels the whole call with a cancelled write.
                    tasks.create_task(self._write(call))
                    await self._obey(call, tasks, obey)
            except ExceptionGroup as several:
                if several.split(PacelineError)[1] is not None:
                    raise
                raise several.exceptions[0] from several
            finally:
                call.cancel()
                await on_end()

    async def _obey(
        self,
        call: Any,
        tasks: asyncio.TaskGroup,
        obey: Callable[[Order, asyncio.TaskGroup], Awaitable[None]],
    ) -> None:
        with rpc_errors():
            while (order := await call.read()) is not grpc.aio.EOF:
                await obey(order, tasks)
        raise Unavailable(f"the service of the {self._what} has sent this host away")

    async def _write(self, call: Any) -> None:
        with rpc_errors():
            while True:
                news = await self._news.get()
                await call.write(news)
                self.waiting_bytes -= news.ByteSize()
