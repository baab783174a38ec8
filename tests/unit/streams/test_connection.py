"""A task that waits for Redis can be cancelled, also at the moment its command was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import redis.asyncio
from redis.asyncio.connection import AbstractConnection

from paceline.local.patience import patient
from paceline.streams import connect

Ask = Callable[[redis.asyncio.Redis], Awaitable[object]]


async def piped(client: redis.asyncio.Redis) -> None:
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("n", 1)
        pipe.get("n")
        await pipe.execute()


ASKS: dict[str, Ask] = {
    "command": lambda client: client.set("n", 1),
    "pipeline": piped,
    "script": lambda client: client.register_script("return 1")(),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_a_cancellation_that_comes_as_a_command_leaves_is_heard(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    client = connect(redis_url)
    await ask(client)  # a connection is there
    send = AbstractConnection._send_packed_command
    went_on = False

    async def asking() -> None:
        nonlocal went_on
        await ask(client)
        went_on = True

    asked = asyncio.create_task(asking())

    async def sending(connection: AbstractConnection, command: list[bytes]) -> None:
        await send(connection, command)
        asked.cancel()

    monkeypatch.setattr(AbstractConnection, "_send_packed_command", sending)
    await asyncio.wait({asked}, timeout=patient(20))
    assert (asked.cancelled(), went_on) == (True, False)
    monkeypatch.undo()
    assert await client.get("n") in (b"1", None), "no answer is left over for the next command"
    await client.aclose()


async def test_who_was_cancelled_may_still_ask(redis_client: redis.asyncio.Redis) -> None:
    waiting = asyncio.Event()

    async def asking() -> object:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            await redis_client.set("left", 1)

    asked = asyncio.create_task(asking())
    await waiting.wait()
    asked.cancel()
    await asyncio.wait({asked}, timeout=patient(20))
    assert asked.cancelled()
    assert await redis_client.get("left") == b"1"
