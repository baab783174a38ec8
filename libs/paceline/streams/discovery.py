"""Finds the master that serves a run: by its Sentinels, or in a cluster by the slot of its keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.cluster import parse_cluster_slots
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.addresses import spelled
from paceline.errors import ConfigError
from paceline.streams.redis_url import Address, RedisUrl

_ANSWER_S = 2.0
"""Seconds that a node or Sentinel has before the next one is asked."""


class Masters(Protocol):
    """Who says where a master is."""

    async def discover_master(self, service_name: str) -> Address:
        """Where the master of a name is now. Raises ConfigError where it can never be found,
        redis.exceptions.ConnectionError while nobody knows.
        """

    async def aclose(self) -> None:
        """Release connections."""


class SentinelMasters:
    """The Sentinels of a URL; names are those of the masters that they watch."""

    def __init__(self, url: RedisUrl) -> None:
        self._url = url
        settings = {**_impatient(url.sentinel_settings), "ssl": url.tls}
        self._clients: dict[Address, Any] = {
            one: redis.asyncio.Redis(host=one[0], port=one[1], **settings) for one in url.addresses
        }

    async def discover_master(self, service_name: str) -> Address:
        """The first master of this name that a Sentinel does not hold for dead."""
        known: set[str] = set()
        errors = []
        for (host, port), client in list(self._clients.items()):
            try:
                watched = await client.sentinel_masters()
            except AuthenticationError as error:
                raise ConfigError(
                    f"the Sentinel at {spelled(host)}:{port} lets nobody in like this: {error}",
                    seen=str(self._url),
                    allowed="sentinel_password=... behind the ? of the URL",
                ) from error
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                errors.append(str(error))
                self._clients[host, port] = self._clients.pop((host, port))  # asked last next time
                continue
            except ResponseError as error:
                raise ConfigError(
                    f"the Redis at {spelled(host)}:{port} is no Sentinel: {error}",
                    seen=str(self._url),
                    allowed="addresses of Sentinels; a single server goes without +sentinel",
                ) from error
            known |= set(watched)
            state = watched.get(service_name)
            if state and state["is_master"] and not (state["is_sdown"] or state["is_odown"]):
                return str(state["ip"]), int(state["port"])
        if known and service_name not in known:
            raise ConfigError(
                f"no such master is watched by {self._url}",
                seen=service_name,
                allowed=sorted(known),
            )
        lack = "; ".join(errors) or "they hold it for dead"
        raise MasterNotFoundError(f"{self._url} name no master: {lack}")

    async def aclose(self) -> None:
        """Close the connections to all Sentinels."""
        for client in [*self._clients.values()]:
            await client.aclose()


class ClusterMasters:
    """The nodes of a cluster; names are hash tags, which are the ids of runs.

    Every question goes to another node than the one before: a node that is cut off from the others
    does not send us to the same dead master for ever.
    """

    def __init__(self, url: RedisUrl) -> None:
        self._url = url
        self._nodes = deque(url.addresses)
        self._clients: dict[Address, Any] = {}

    async def discover_master(self, service_name: str) -> Address:
        """The master of the slot that all keys of a run are in."""
        slot = key_slot(f"{{{service_name}}}".encode())
        for (first, last), owners in (await self._slots()).items():
            if first <= slot <= last:
                return _address(owners["primary"])
        raise MasterNotFoundError(f"slot {slot} of {service_name} has no master in {self._url}")

    async def masters(self) -> list[Any]:
        """A client of each master; they are closed with this.

        Raises redis.exceptions.ConnectionError while the cluster is down.
        """
        slots = await self._slots()
        covered = sum(last - first + 1 for first, last in slots)
        if covered < REDIS_CLUSTER_HASH_SLOTS:
            lacking = REDIS_CLUSTER_HASH_SLOTS - covered
            raise RedisConnectionError(f"{lacking} slots of {self._url} have no master")
        found = [
            self._client(one)
            for one in dict.fromkeys(_address(owners["primary"]) for owners in slots.values())
        ]
        for one in found:
            state = await one.execute_command("CLUSTER INFO")
            if state["cluster_state"] != "ok":
                raise RedisConnectionError(f"{self._url} is down: {_address_of(one)} says so")
        return found

    async def aclose(self) -> None:
        """Close the connections to all nodes."""
        for client in [*self._clients.values()]:
            await client.aclose()

    async def _slots(self) -> dict[tuple[int, int], dict[str, Any]]:
        """(first, last slot) -> owners, as some node has it."""
        errors = []
        for _ in range(len(self._nodes)):
            node = self._nodes[0]
            self._nodes.rotate(-1)
            try:
                answer = await self._client(node).execute_command("CLUSTER SLOTS")
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                errors.append(str(error))
                continue
            except ResponseError as error:
                raise ConfigError(
                    f"the Redis at {node[0]}:{node[1]} is no node of a cluster: {error}",
                    seen=str(self._url),
                    allowed="nodes of a cluster; a single server goes without +cluster",
                ) from error
            slots = parse_cluster_slots(answer, current_host=node[0])
            self._learn(slots.values())
            return slots
        raise RedisConnectionError(f"no node answers: {'; '.join(errors)}")

    def _learn(self, owners: Iterable[dict[str, Any]]) -> None:
        """Keep the nodes of now beside those of the URL, in the order of asking."""
        now = dict.fromkeys(
            _address(one) for shard in owners for one in (shard["primary"], *shard["replicas"])
        )
        known = {*now, *self._url.addresses}
        self._nodes = deque(dict.fromkeys([*(n for n in self._nodes if n in known), *now]))

    def _client(self, node: Address) -> Any:
        if node not in self._clients:
            host, port = node
            settings = {**_impatient(self._url.settings), "host": host, "port": port}
            pool = redis.asyncio.ConnectionPool(**settings)
            self._clients[node] = redis.asyncio.Redis.from_pool(pool)
        return self._clients[node]


def masters_of(url: RedisUrl) -> Masters:
    """Who says where the masters of a URL are, which is no single server's."""
    return ClusterMasters(url) if url.kind == "cluster" else SentinelMasters(url)


def _impatient(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a connection of which there are others to try."""
    limits = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S}
    return {"protocol": 2, **settings, **limits, "retry": Retry(NoBackoff(), 0)}


def _address(one: Any) -> Address:
    return str(one[0]), int(one[1])


def _address_of(client: Any) -> str:
    settings = client.connection_pool.connection_kwargs
    return f"{settings['host']}:{settings['port']}"
