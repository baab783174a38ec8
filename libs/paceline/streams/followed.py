"""Clients that follow a master wherever it goes: behind Sentinel, or as a shard of a cluster.

To their callers they are redis.asyncio.Redis. A connection asks where the master is when it is
made; one that meets a server which serves its keys no more is closed, and the command is sent again
where they are served now.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.commands.cluster import READ_COMMANDS
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    NoScriptError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.streams.discovery import masters_of
from paceline.streams.outage import Cancellable, Outage
from paceline.streams.redis_url import RedisUrl

T = TypeVar("T")
_ELSEWHERE = (AskError, ClusterDownError, TryAgainError)  # AskError is also that of MOVED
_NO_MASTER = re.compile(r"\b(READONLY|UNBLOCKED|NOREPLICAS|MASTERDOWN)\b")
_REPLICA_MS = 250
"""A write that its replicas do not have by then is sent again: each is idempotent."""
_READS = READ_COMMANDS | {"PING", "INFO", "CONFIG GET", "XRANGE", "XREVRANGE", "XINFO GROUPS"}


class UntilBack(Retry):
    """Tries again until the master, or the one after it, has been away for too long."""

    def __init__(self, outage_s: float) -> None:
        super().__init__(NoBackoff(), -1)
        self._outage_s = outage_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """What `do` returns at last; raises its error when the outage is over the limit."""
        outage, failures = Outage(self._outage_s), 0
        while True:
            try:
                return await do()
            except self._supported_errors as error:
                refused = isinstance(error, AuthenticationError)
                if refused or (is_retryable is not None and not is_retryable(error)):
                    raise
                failures += 1
                await (fail(error, failures) if with_failure_count else fail(error))
                await outage.pause(error)


class Following(AbstractConnection):
    """A connection to the master of the moment; of a pool that knows who that is."""

    def __init__(self, *, connection_pool: Any, **settings: Any) -> None:
        self._pool = connection_pool
        super().__init__(**settings)

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Connect once: whoever tries again has to ask again where the master is."""
        if not self.is_connected:
            self.host, self.port = await self._pool.get_master_address()
        await super().connect_check_health(check_health, retry_socket_connect=False)

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """An answer of the master; that of a server which is none is a lost connection."""
        try:
            return await super().read_response(*args, **kwargs)
        except ResponseError as error:
            if not isinstance(error, _ELSEWHERE) and not _NO_MASTER.search(str(error)):
                raise
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"not its master: {error}") from error


class FollowedPool(SentinelConnectionPool):
    """Connections to the master of one name."""

    def __init__(self, url: RedisUrl, service: str, **settings: Any) -> None:
        kind = (Cancellable, Following, SSLConnection if url.tls else Connection)
        made = {**settings, "connection_class": type("Connection", kind, {})}
        begin: Any = super().__init__  # redis-py leaves some of its functions without types
        begin(service, masters_of(url), **made)
        self.url = url
        self.settings = settings

    async def replicated(self, connection: Any) -> None:
        """Wait until the last write on a connection is where the URL wants it.

        Raises redis.exceptions.TimeoutError: then it may be lost, and has to be sent again.
        """
        if not self.url.replicas:
            return
        await connection.send_command("WAIT", self.url.replicas, _REPLICA_MS)
        there = await connection.read_response()
        if there < self.url.replicas:
            raise RedisTimeoutError(f"{there} of {self.url.replicas} replicas have it")


class FollowingRedis(redis.asyncio.Redis):
    """A client of one master; a write is answered when `replicas` others have it too."""

    connection_pool: FollowedPool

    @classmethod
    def over(cls, pool: FollowedPool) -> FollowingRedis:
        """A client that closes its pool with itself."""
        made = cls(connection_pool=pool)
        made.auto_close_connection_pool = True
        return made

    @property
    def url(self) -> RedisUrl:
        """Where the master was looked for."""
        return self.connection_pool.url

    def twin(self, changes: dict[str, Any]) -> FollowingRedis:
        """A client of the same master with other settings."""
        pool = self.connection_pool
        return following(pool.url, pool.service_name, {**pool.settings, **changes})

    async def _send_command_parse_response(
        self, conn: Any, command_name: str, *args: Any, **options: Any
    ) -> Any:
        ask: Any = super()._send_command_parse_response
        answer = await ask(conn, command_name, *args, **options)
        if command_name not in _READS:
            await self.connection_pool.replicated(conn)
        return answer

    def pipeline(
        self, transaction: bool = True, shard_hint: str | None = None
    ) -> FollowingPipeline:
        """Commands that are sent together, all to the same master."""
        pool, callbacks = self.connection_pool, self.response_callbacks
        return FollowingPipeline(pool, callbacks, transaction, shard_hint)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections to the master and those to who knows it."""
        await super().aclose(close_connection_pool)
        await self.connection_pool.sentinel_manager.aclose()


class FollowingPipeline(Pipeline):
    """Loads its scripts again where they are not known, e.g. on a new master."""

    connection_pool: FollowedPool

    async def _execute_transaction(self, connection: Any, commands: Any, raise_: Any) -> Any:
        return await self._whole(super()._execute_transaction, connection, commands, raise_)

    async def _execute_pipeline(self, connection: Any, commands: Any, raise_: bool) -> Any:
        return await self._whole(super()._execute_pipeline, connection, commands, raise_)

    async def _whole(self, execute: Any, connection: Any, commands: Any, raise_: bool) -> Any:
        try:
            answers = await execute(connection, commands, raise_)
        except NoScriptError as error:
            for script in self.scripts:
                await connection.send_command("SCRIPT LOAD", script.script)
                await connection.read_response()
            raise RedisConnectionError("its scripts were not known") from error
        await self.connection_pool.replicated(connection)
        return answers


def following(url: RedisUrl, service: str, settings: dict[str, Any]) -> FollowingRedis:
    """A client of the master that a name stands for. `settings` are those of its connections."""
    return FollowingRedis.over(FollowedPool(url, service, **settings))
