"""Carries out flows on the running event loop of asyncio.

Owns the one httpx.AsyncClient; decides nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import TypeVar

import httpx

from paceline.client.answers import Json
from paceline.client.flows import Answer, Flow, Lost, Outcome, Pause, Send
from paceline.client.server_events import EventReader
from paceline.client.settings import Settings
from paceline.client.wire import broken_off, http_options, lost_by, within_bounds

T = TypeVar("T")


class AsyncWire:
    """Belongs to one event loop; its tasks may share it."""

    def __init__(self, settings: Settings, verify: bool | ssl.SSLContext) -> None:
        self._http = httpx.AsyncClient(**http_options(settings, verify))

    async def run(self, flow: Flow[T]) -> T:
        """The flow's result. Raises what it raises."""
        return await _carry_out(flow, self._whole)

    async def events(self, flow: Flow[None]) -> AsyncGenerator[Json]:
        """The events of the stream that the flow opens. Closing the generator ends the stream at
        the gateway.

        Raises Unavailable when the stream breaks off, DeadlineExceeded when its time is up,
        DataLoss.
        """
        async with AsyncExitStack() as held:
            opened: list[tuple[httpx.Response, float]] = []

            async def begin(send: Send) -> Outcome:
                await held.aclose()  # what an earlier attempt left
                end = _now() + send.left_s
                response = await held.enter_async_context(self._exchange(send))
                if response.status_code != httpx.codes.OK:
                    return Answer(response.status_code, response.headers, await _body(response))
                opened.append((response, end))
                return Answer(response.status_code, response.headers, b"")

            await _carry_out(flow, begin)
            async with aclosing(_events(*opened[0])) as events:
                async for event in events:
                    yield event

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _whole(self, send: Send) -> Outcome:
        async with self._exchange(send) as response:
            return Answer(response.status_code, response.headers, await _body(response))

    def _exchange(self, send: Send) -> AbstractAsyncContextManager[httpx.Response]:
        return self._http.stream(
            send.method, send.path, headers=dict(send.headers), content=send.content
        )


async def _carry_out(flow: Flow[T], once: Callable[[Send], Awaitable[Outcome]]) -> T:
    outcome: Outcome = None
    while True:
        try:
            step = flow.send(outcome)
        except StopIteration as ended:
            result: T = ended.value
            return result
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            outcome = None
        else:
            outcome = await _in_time(step, once)


async def _in_time(send: Send, once: Callable[[Send], Awaitable[Outcome]]) -> Outcome:
    try:
        async with asyncio.timeout(send.left_s):
            return await once(send)
    except TimeoutError as error:
        return Lost(sent=True, late=True, cause=error)
    except httpx.RequestError as error:
        return lost_by(error, late=False)


async def _body(response: httpx.Response) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size = within_bounds(size + len(part))
        parts.append(part)
    return b"".join(parts)


async def _events(response: httpx.Response, end: float) -> AsyncGenerator[Json]:
    reader = EventReader()
    pieces = response.aiter_bytes()
    broken: Exception | None = None
    late = False
    try:
        while not reader.done:
            async with asyncio.timeout_at(
                end
            ):  # never across a yield: the consumer's time is its own
                piece = await anext(pieces, b"")
            if not piece:
                break
            for event in reader.feed(piece):
                yield event
    except TimeoutError as error:
        broken, late = error, True
    except httpx.RequestError as error:
        broken = error
    if not reader.done:
        raise broken_off(broken, late=late)


def _now() -> float:
    return asyncio.get_running_loop().time()
