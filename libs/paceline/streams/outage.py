"""Waiting for a Redis that is away: for how long, and with cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

OUTAGE_S = 10.0
"""Seconds a server may stay away before a call fails with Unavailable."""

OUTAGE_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError)
BACKOFF_CAP_S = 0.25


class Outage:
    """Paces the retries of one call while the server is away, up to a deadline."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_s: float | None = None
        self._pause_s = 0.01

    async def pause(self, error: BaseException) -> None:
        """Waits before the next try. Raises `error` when the server has been away for too long."""
        now = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = now
        if now - self._began_s > self._limit_s:
            raise error
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, BACKOFF_CAP_S)


class Cancellable(AbstractConnection):
    """A connection that never loses a cancellation.

    The client sends with asyncio.wait_for. Before Python 3.12 that call loses a cancellation that
    arrives with the last byte, so the caller would continue.
    """

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(*args, **kwargs)
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # the answer has no reader any more
            raise asyncio.CancelledError
