"""Reads the answers of several streaming calls as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from paceline.errors import Unavailable
from paceline.rpc import responses, rpc_errors
from paceline.services.rollout_gateway.background import cancel

Told = asyncio.Queue[tuple[int, Any] | asyncio.Task[None]]


async def merged(
    calls: Mapping[int, Any],
    *,
    endless: bool = False,
    beside: Iterable[asyncio.Task[None]] = (),
) -> AsyncGenerator[tuple[int, Any]]:
    """Messages of all calls in order of arrival, each with the number of its call, until all calls
    end.

    Raises the first failure, also of a task in `beside`. Raises Unavailable if a call ends although
    `endless` is set.
    """
    told: Told = asyncio.Queue()
    readers = [asyncio.create_task(_read(number, call, told)) for number, call in calls.items()]
    for task in (*readers, *beside):
        task.add_done_callback(told.put_nowait)
    left = len(readers)
    try:
        while left:
            news = await told.get()
            if not isinstance(news, asyncio.Task):
                yield news
                continue
            news.result()
            left -= news in readers
            if endless:
                raise Unavailable("a replica has ended its answer", seen="end of stream")
    finally:
        await cancel(*readers)


async def _read(number: int, call: Any, told: Told) -> None:
    with rpc_errors():
        async with aclosing(responses(call)) as stream:
            async for message in stream:
                told.put_nowait((number, message))
