"""Connections to Redis: one place for protocol, timeouts, retries and names of keys.

It owns no data.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.config.shared import RUN_ID
from paceline.errors import ConfigError, InvalidInput, ResourceExhausted, Unavailable

OUTAGE_S = 10.0
"""Seconds a server may stay away before a call fails with Unavailable."""

OUTAGE_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError)
_BACKOFF_CAP_S = 0.25
REDIS_FULL = "REDIS_FULL"
_FULL = {
    "OOM": ("has no memory left", "free memory there, or more of it with maxmemory"),
    "MISCONF": ("cannot write to its disk", "free space on its disk"),
    "READONLY": ("is a replica that takes no writes", "the URL of its primary"),
}
"""What a server answers that takes no writes -> what is wrong, and what is needed."""


def run_key(run_id: str, name: str) -> str:
    """Key `paceline:{<run>}:<name>`; the braces keep one run's keys together on a cluster.

    Raises InvalidInput.
    """
    if not re.fullmatch(RUN_ID, run_id):
        raise InvalidInput("a run id cannot be part of a key", seen=run_id, allowed=RUN_ID)
    return f"paceline:{{{run_id}}}:{name}"


def connect(url: str, *, outage_s: float = OUTAGE_S) -> redis.asyncio.Redis:
    """Client that outlives an outage of `outage_s` seconds.

    Every command here that is repeated after a lost answer is idempotent. Raises ConfigError for a
    URL that is none.
    """
    retries = math.ceil(outage_s / _BACKOFF_CAP_S) + 4
    try:
        client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=max(5.0, outage_s / 2),
            socket_connect_timeout=2.0,
            **({} if url.startswith("unix:") else {"socket_keepalive": True}),
            health_check_interval=0,
            max_connections=64,
            retry=Retry(ExponentialWithJitterBackoff(cap=_BACKOFF_CAP_S, base=0.02), retries),
            retry_on_error=[*OUTAGE_ERRORS],
        )
    except ValueError as error:
        allowed = "redis://host:port/db, rediss://host:port/db, unix:///path?db=0"
        raise ConfigError("not a Redis URL", seen=url, allowed=allowed) from error

    pool = client.connection_pool
    pool.connection_class = type("Connection", (_Cancellable, pool.connection_class), {})
    return client


class _Cancellable(AbstractConnection):
    """Hears every cancellation.

    The client sends with asyncio.wait_for, which before Python 3.12 forgets a cancellation that
    comes as the last byte leaves: the caller would go on as if nobody had asked it to end.
    """

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(*args, **kwargs)
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # nobody reads the answer
            raise asyncio.CancelledError


def blocking_twin(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """A client of the same server for blocking reads: no answer timeout and no silent repeat.

    A repeat inside the client would hide that a delivery was lost on its way; the reader has to
    know.
    """
    pool = client.connection_pool
    settings: dict[str, Any] = {
        **pool.connection_kwargs,
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
    }
    twin = redis.asyncio.ConnectionPool(
        connection_class=pool.connection_class, max_connections=64, **settings
    )
    return redis.asyncio.Redis.from_pool(twin)  # closed with the client


def address_of(client: redis.asyncio.Redis) -> str:
    """Where a client points, without its password: for error messages."""
    settings = client.connection_pool.connection_kwargs
    return str(settings.get("path") or f"{settings.get('host')}:{settings.get('port')}")


@contextmanager
def redis_errors(client: redis.asyncio.Redis, what: str) -> Iterator[None]:
    """Raise errors of the Redis client as ours, which say `what` was tried and where.

    Unavailable: no answer. ResourceExhausted (reason REDIS_FULL): memory or disk is full, or a
    replica takes no writes; the same call works when that has ended. InvalidInput: anything else.
    """
    try:
        yield
    except OUTAGE_ERRORS as error:
        raise Unavailable(
            f"Redis at {address_of(client)} does not answer: {what}: {error}"
        ) from error
    except ResponseError as error:
        if (full := _full(error)) is None:
            raise InvalidInput(f"Redis at {address_of(client)} refused: {what}: {error}") from error
        wrong, needed = full
        raise ResourceExhausted(
            f"Redis at {address_of(client)} {wrong}: {what}",
            reason=REDIS_FULL,
            seen=error,
            allowed=needed,
        ) from error


def _full(error: ResponseError) -> tuple[str, str] | None:
    """Why the server takes no writes; None where it refused for another reason.

    Redis 6.2 quotes the code in the midst of a script's error and of a transaction's; a pipeline
    puts our own words, with the data sent, in front.
    """
    kinds = {OutOfMemoryError: "OOM", ReadOnlyError: "READONLY"}  # their text lacks the code
    answer = str(error).rpartition("caused error: ")[2]
    quoted = re.search(rf"\b({'|'.join(_FULL)})\b", answer)
    code = kinds.get(type(error)) or (quoted and quoted.group())
    return _FULL[code] if code else None


class Outage:
    """Paces the tries of one call while the server is away, up to a deadline."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_s: float | None = None
        self._pause_s = 0.01

    async def pause(self, error: BaseException) -> None:
        """Wait before the next try; raises `error` when the server has been away for too long."""
        now = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = now
        if now - self._began_s > self._limit_s:
            raise error
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, _BACKOFF_CAP_S)
