"""Describes the place of a gateway's replica: its number, workers, sockets and files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.config import Config, SecurityConfig
from paceline.errors import ConfigError
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engine_places import shares_of
from paceline.services.rollout_gateway.sessions.shard import Shard
from paceline.tagged_json import from_object, to_object
from paceline.whole_files import write_whole


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """One replica. Its workers have consecutive numbers within the run."""

    shard: Shard
    first_worker: int
    workers: int
    places_here: int  # workers of all replicas
    sockets: str  # directory of its sockets, private to this user
    state: str  # directory of its state over restarts

    @property
    def name(self) -> str:
        """Name in logs, and of its log file."""
        return f"gateway-{self.shard.index}"

    @property
    def address(self) -> str:
        """Address of its gRPC server."""
        return f"unix:{self.sockets}/{self.shard.index}.grpc"

    @property
    def http_socket(self) -> str:
        """Path of the socket of its HTTP API."""
        return f"{self.sockets}/{self.shard.index}.http"

    def holds(self, worker: int) -> bool:
        """Whether this replica has the worker with this number within the run."""
        return self.first_worker <= worker < self.first_worker + self.workers


def places(config: GatewayConfig, spool: Path, sockets: Path) -> list[ReplicaPlace]:
    """The replicas of a gateway, with equal shares of its workers as far as possible.

    Raises ConfigError when there are fewer workers than replicas.
    """
    count, workers = config.replicas, config.worker_count
    if count > workers:
        raise ConfigError(
            "gateway.replicas: each replica needs an engine worker",
            seen=f"{count} replicas, {workers} workers",
            allowed=f"at most {workers}, or more gateway.engine.workers",
        )
    return [
        ReplicaPlace(
            Shard(index, count),
            share.start,
            len(share),
            workers,
            str(sockets),
            str(spool / f"replica-{index}"),
        )
        for index, share in enumerate(shares_of(workers, count))
    ]


def check_cores(config: GatewayConfig, cores: int) -> None:
    """Raises ConfigError for more replicas than cores. Each replica keeps a core busy with streams;
    on a shared core every stream would wait.
    """
    if config.replicas > cores:
        raise ConfigError(
            "gateway.replicas: each replica needs a core",
            seen=f"{config.replicas} replicas, {cores} usable cores",
            allowed=f"at most {cores}",
        )


def inside(security: SecurityConfig) -> SecurityConfig:
    """Security settings between head and replicas. Sockets in a private directory need no TLS."""
    return security.model_copy(update={"tls_cert": "", "tls_key": "", "tls_ca": ""})


def write_place(path: Path, place: ReplicaPlace, config: GatewayConfig, spool: Path) -> None:
    """Store the start settings of a replica's process, readable by this user only."""
    own = _own_settings(place, config).model_copy(update={"spool_dir": str(spool), "replicas": 1})
    told = {"place": to_object(place), "config": own.model_dump(mode="json")}
    write_whole(path, json.dumps(told))


def _own_settings(place: ReplicaPlace, config: GatewayConfig) -> GatewayConfig:
    """The settings with the replica's share of the whole gateway's limits."""

    def share(total: int) -> int:
        return -(-total // place.shard.count)

    def shared(section: Config, *names: str) -> dict[str, int]:
        return {name: share(getattr(section, name)) for name in names}

    sessions, queue = config.sessions, config.queue
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"workers": place.workers}),
            "sessions": sessions.model_copy(update=shared(sessions, "limit", "ended_tokens")),
            "queue": queue.model_copy(update=shared(queue, "limit", "running")),
            **shared(config, "max_unsent_bytes"),
        }
    )


def read_place(path: Path) -> tuple[ReplicaPlace, GatewayConfig]:
    """The content that `write_place` stored."""
    told = json.loads(path.read_text(encoding="utf-8"))
    return from_object(ReplicaPlace, told["place"]), GatewayConfig.model_validate(told["config"])
