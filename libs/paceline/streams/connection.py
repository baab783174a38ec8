"""Connections to Redis: the one place for URLs, protocol, timeouts, retries and key names.

redis://[user:password@]host:port/db          rediss:// with TLS; unix:///path?db=0

Options of redis-py, such as ssl_ca_certs, follow a "?".
"""

import asyncio
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.addresses import spelled
from paceline.config import RUN_ID
from paceline.errors import ConfigError, InvalidInput, ResourceExhausted, Unavailable

ALLOWED = "redis://host:port/db, rediss://host:port/db, unix:///path?db=0"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Address and connection settings of one server."""

    host: str
    settings: dict[str, Any] = field(repr=False)  # of a connection, as redis-py names them
    tls: bool
    socket: bool

    @property
    def has_password(self) -> bool:
        """Whether the server authenticates its clients."""
        return "password" in self.settings or "ssl_certfile" in self.settings


def shown(url: str) -> str:
    """A URL without its password and options."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def parse_redis_url(url: str) -> RedisUrl:
    """Address and settings of a URL.

    Raises ConfigError for a malformed URL, a cluster or Sentinels: a run's keys are written
    together, so they need one server.
    """
    scheme = urlsplit(url).scheme
    if "+" in scheme:
        raise ConfigError(
            "a run keeps its keys on one Redis server; clusters and Sentinels are not supported",
            seen=shown(url),
            allowed=ALLOWED,
        )
    try:
        settings: dict[str, Any] = dict(parse_url(url))
    except ValueError as error:
        raise ConfigError(f"not a Redis URL: {error}", seen=shown(url), allowed=ALLOWED) from error
    host = settings.get("host", "localhost")
    return RedisUrl(host, settings, scheme == "rediss", scheme == "unix")


OUTAGE_S = 10.0
"""Seconds a server may stay away before a call fails with Unavailable."""

OUTAGE_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError)
BACKOFF_CAP_S = 0.25


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


REDIS_FULL = "REDIS_FULL"
_FULL = {
    "OOM": ("has no memory left", "free memory there, or more of it with maxmemory"),
    "MISCONF": ("cannot write to its disk", "free space on its disk"),
    "READONLY": ("is a replica that takes no writes", "the URL of its primary"),
}
"""Error code of a server that refuses writes -> the fault, and the remedy."""


def run_key(run_id: str, name: str) -> str:
    """Key `paceline:{<run>}:<name>`.

    Raises InvalidInput.
    """
    if not re.fullmatch(RUN_ID, run_id):
        raise InvalidInput("a run id cannot be part of a key", seen=run_id, allowed=RUN_ID)
    return f"paceline:{{{run_id}}}:{name}"


def connect(url: str, *, outage_s: float = OUTAGE_S) -> redis.asyncio.Redis:
    """Client of a server, see RedisUrl. It retries through an outage of `outage_s` seconds.

    Every command that may be repeated after a lost answer is idempotent. Raises ConfigError for a
    malformed URL.
    """
    where = parse_redis_url(url)
    settings: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": max(5.0, min(outage_s, OUTAGE_S) / 2),
        "socket_connect_timeout": 2.0,
        **({} if where.socket else {"socket_keepalive": True}),
        "health_check_interval": 0,
        "max_connections": 64,
        "retry_on_error": [*OUTAGE_ERRORS],
    }
    retries = math.ceil(outage_s / BACKOFF_CAP_S) + 4
    settings["retry"] = Retry(ExponentialWithJitterBackoff(cap=BACKOFF_CAP_S, base=0.02), retries)
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(url, **settings)
    pool = client.connection_pool
    pool.connection_class = type("Connection", (Cancellable, pool.connection_class), {})
    return client


def blocking_twin(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """A client of the same server for blocking reads, without answer timeout and silent repeat.

    A repeat inside the client would hide a delivery lost on its way from the reader.
    """
    settings: dict[str, Any] = {
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
    }
    pool = client.connection_pool
    twin = redis.asyncio.ConnectionPool(
        connection_class=pool.connection_class,
        max_connections=64,
        **{**pool.connection_kwargs, **settings},
    )
    return redis.asyncio.Redis.from_pool(twin)  # closed with the client


def address_of(client: redis.asyncio.Redis) -> str:
    """A client's address without its password, for error messages."""
    settings = client.connection_pool.connection_kwargs
    host = spelled(str(settings.get("host")))
    return str(settings.get("path") or f"{host}:{settings.get('port')}")


@contextmanager
def redis_errors(client: redis.asyncio.Redis, operation: str) -> Iterator[None]:
    """Raises errors of the Redis client as Paceline's errors; `operation` names the attempt.

    Unavailable: no answer. ResourceExhausted (reason REDIS_FULL): memory or disk is full, or a
    replica refuses writes; the same call works once the condition has ended. InvalidInput: any
    other error.
    """
    try:
        yield
    except OUTAGE_ERRORS as error:
        message = f"Redis at {address_of(client)} does not answer: {operation}: {error}"
        raise Unavailable(message) from error
    except ResponseError as error:
        if (full := _full(error)) is None:
            message = f"Redis at {address_of(client)} refused: {operation}: {error}"
            raise InvalidInput(message) from error
        fault, needed = full
        message = f"Redis at {address_of(client)} {fault}: {operation}"
        raise ResourceExhausted(message, reason=REDIS_FULL, seen=error, allowed=needed) from error


def _full(error: ResponseError) -> tuple[str, str] | None:
    """Fault and remedy of a server that refuses writes; None for any other error.

    Redis 6.2 quotes the code inside a script's or transaction's error. A pipeline prefixes its own
    words and the data sent.
    """
    kinds = {OutOfMemoryError: "OOM", ReadOnlyError: "READONLY"}  # without the code in their text
    answer = str(error).rpartition("caused error: ")[2]
    quoted = re.search(rf"\b({'|'.join(_FULL)})\b", answer)
    code = kinds.get(type(error)) or (quoted and quoted.group())
    return _FULL[code] if code else None
