"""A client of a Redis cluster, which sends what concerns a run to the master that has the run.

The keys of a run share one hash tag (`run_key`) and with it one master, so that its scripts and
transactions are those of a single server, and what sends them is a client of a single server that
follows a master. redis-py's RedisCluster does not do here: it tries again without a pause, so that
a failover outlasts it, asks the server for the keys of each XREADGROUP, and builds a transaction
in threads with event loops of their own.
"""

from __future__ import annotations

import re
from typing import Any

import redis.asyncio

from paceline.errors import InvalidInput
from paceline.streams.discovery import ClusterMasters
from paceline.streams.followed import FollowingPipeline, FollowingRedis, UntilBack, following
from paceline.streams.redis_url import RedisUrl

_RUN = re.compile(rb"paceline:\{([^}]+)\}:")


class ClusterRedis(redis.asyncio.Redis):
    """A client of all runs of a cluster. Every command has to name a key of one run."""

    def __init__(self, url: RedisUrl, settings: dict[str, Any]) -> None:
        host, port = url.addresses[0]
        super().__init__(host=host, port=port, protocol=2)  # its own pool only encodes
        self.url = url
        self._settings = settings
        self._masters = ClusterMasters(url)
        self._shards: dict[str, FollowingRedis] = {}

    def twin(self, changes: dict[str, Any]) -> ClusterRedis:
        """The same with other settings."""
        return ClusterRedis(self.url, {**self._settings, **changes})

    async def masters(self) -> list[Any]:
        """A client of each master, closed with this one; waits while the cluster is down.

        Raises redis.exceptions.ConnectionError when that takes too long, ConfigError where there is
        no cluster.
        """
        retry: UntilBack = self._settings["retry"]
        found: list[Any] = await retry.call_with_retry(self._masters.masters, _try_again)
        return found

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """What the master of the run answers; scripts are loaded where we have runs."""
        if args[0] == "SCRIPT LOAD":
            shards: list[Any] = list(self._shards.values())
            return [await one.execute_command(*args) for one in shards][-1]
        shard: Any = self.shard(args)  # redis-py has no types here
        return await shard.execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> ShardPipeline:
        """Commands that are sent together; the first one's run has to be that of all."""
        return ShardPipeline(self, transaction)

    def shard(self, command: tuple[Any, ...]) -> FollowingRedis:
        """The client of the run that a command is about."""
        run_id = _run_of(command)
        if run_id not in self._shards:
            self._shards[run_id] = following(self.url, run_id, self._settings)
        return self._shards[run_id]

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections to all nodes."""
        for one in [*self._shards.values()]:
            await one.aclose()
        await self._masters.aclose()
        await super().aclose(close_connection_pool)


class ShardPipeline(FollowingPipeline):
    """Goes to the master of the run that its first command is about."""

    def __init__(self, cluster: ClusterRedis, transaction: bool) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, transaction, None)
        self._cluster = cluster

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send what has been gathered."""
        if self.command_stack:
            self.connection_pool = self._cluster.shard(self.command_stack[0][0]).connection_pool
        return await super().execute(raise_on_error)


async def _try_again(error: Exception) -> None:
    return None


def _run_of(command: tuple[Any, ...]) -> str:
    for part in command[1:]:
        if isinstance(part, str | bytes):
            found = _RUN.match(part.encode() if isinstance(part, str) else part)
            if found is not None:
                return found.group(1).decode()
    raise InvalidInput(
        "in a cluster a command has to name a key of a run",
        seen=command[0],
        allowed="keys of run_key()",
    )
