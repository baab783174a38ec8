"""Runs flows over the single httpx.AsyncClient of a client."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

import httpx

from paceline.client.answers import Json
from paceline.client.calls import GatewayCall
from paceline.client.exchange import (
    async_exchange,
    async_until,
    broken_off,
    http_options,
    lost_by,
    within_bounds,
)
from paceline.client.flows import Flow, HttpAnswer, Lost, Outcome, Pause, Send, ask, opening
from paceline.client.server_events import EventReader
from paceline.client.settings import ClientSettings

T = TypeVar("T")
AsyncOutcome = Awaitable[Outcome]  # only async


class AsyncWire:
    """Shared by a client and its sessions. A flow or a stream belongs to its caller."""

    def __init__(self, settings: ClientSettings, verify: bool | ssl.SSLContext) -> None:
        self.settings = settings
        self._http = httpx.AsyncClient(**http_options(settings, verify))

    async def ask(self, call: GatewayCall[T]) -> T:
        """The call's result. Raises as `flows.ask`."""
        return await self.run(ask(call, self.settings))

    async def run(self, flow: Flow[T]) -> T:
        """The flow's result. Raises the flow's errors."""
        return await _carry_out(flow, self._whole)

    async def events(self, call: GatewayCall[Any]) -> AsyncGenerator[Json]:
        """The events of the stream that the call opens.

        Closing the generator ends the stream at the gateway. Raises Unavailable when the stream
        breaks off, DeadlineExceeded at its deadline, DataLoss.
        """
        async with AsyncExitStack() as held:
            opened: list[tuple[httpx.Response, float]] = []

            async def begin(send: Send, end: float) -> Outcome:
                await held.aclose()  # left by an earlier attempt
                head = async_exchange(self._http, send, end)
                response = await held.enter_async_context(head)
                if response.status_code != httpx.codes.OK:
                    return HttpAnswer(response.status_code, response.headers, await _body(response))
                opened.append((response, end))
                return HttpAnswer(response.status_code, response.headers, b"")

            await _carry_out(opening(call, self.settings), begin)
            async with aclosing(_events(*opened[0])) as events:
                async for event in events:
                    yield event

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def _whole(self, send: Send, end: float) -> Outcome:
        async with async_exchange(self._http, send, end) as response:
            answer = HttpAnswer(response.status_code, response.headers, await _body(response))
        if time.monotonic() >= end:  # a truncated body may look complete
            raise TimeoutError("the deadline passed while the answer came in")
        return answer


async def _carry_out(flow: Flow[T], once: Callable[[Send, float], AsyncOutcome]) -> T:
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


async def _in_time(send: Send, once: Callable[[Send, float], AsyncOutcome]) -> Outcome:
    end = time.monotonic() + send.left_s
    try:
        async with async_until(end):
            return await once(send, end)
    except TimeoutError as error:
        return Lost(sent=True, late=True, cause=error)
    except httpx.RequestError as error:
        return lost_by(error, late=time.monotonic() >= end)


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
    try:
        while not reader.done:
            async with async_until(end):  # never across a yield: the consumer's time does not count
                piece = await anext(pieces, b"")
            if not piece:
                break
            for event in reader.feed(piece):
                yield event
    except (TimeoutError, httpx.RequestError) as error:
        broken = error
    if not reader.done:
        raise broken_off(broken, late=time.monotonic() >= end)
