"""Says which engine workers are on which host, what those of one host are made by, and what hosts
need of each other. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.local.forking import Forker
from paceline.plugins import import_object
from paceline.report.machine import same_on_hosts
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engine_places import OF_A_HOST, by_host, shares_of
from paceline.services.rollout_gateway.engine_settings import engine_settings
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.features.publisher import ROW_DTYPES
from paceline.services.rollout_gateway.place import ReplicaPlace
from paceline.services.rollout_gateway.workers.hosting import WorkerHost
from paceline.services.rollout_gateway.workers.hosts import WorkerHosts
from paceline.services.rollout_gateway.workers.local import LocalWorkers, RowShape
from paceline.services.rollout_gateway.workers.spool_copies import SpoolCopies
from paceline.weights import Spool

RING_ROWS = 16_384
"""Rows of each worker's ring: eight prefills of 2,048 tokens between two reads, which come with the
tokens of every round.
"""


def row_shape(config: GatewayConfig) -> RowShape | None:
    """Of the hidden rows that workers capture; None where nobody wants any."""
    if not config.trajectories:
        return None
    if path := find_engine(config.engine.kind).row_layout:
        layout: RowLayout = import_object(path)(engine_settings(config))
    else:
        model = json.loads((config.model_dir / "config.json").read_text(encoding="utf-8"))
        layout = RowLayout.last(int(model.get("hidden_size", 0)))
    return RowShape(RING_ROWS, layout, ROW_DTYPES[config.features.dtype][1])


def local_workers(config: GatewayConfig, places: int, forker: Forker | None = None) -> LocalWorkers:
    """What makes the workers of a host that has so many places. `forker`: see LocalWorkers."""
    settings, rows = engine_settings(config), row_shape(config)
    return LocalWorkers(config.engine, settings, rows, config.run.heartbeat_s, places, forker)


def other_hosts(
    config: GatewayConfig, spool: Spool, place: ReplicaPlace | None
) -> WorkerHosts | None:
    """The hosts that the workers of the gateway, or of a replica, are on besides its own; None
    where there are none. Raises ConfigError where they could not load what is pushed.
    """
    hosts = place.hosts if place else config.engine.hosts
    if not any(hosts[1:]):
        return None
    _require_spool(config)
    same = place.same_on_hosts if place else same_on_hosts(config, OF_A_HOST)
    return WorkerHosts(hosts, row_shape(config), same, spool, config.engine.copies_fan_out)


@dataclass(frozen=True, slots=True)
class HeldWorkers:
    """What one of these hosts holds for the gateway, or for each replica that has workers there."""

    local: LocalWorkers
    copies: SpoolCopies | None
    of_replicas: Mapping[int, WorkerHost]

    async def close(self) -> None:
        """Ends what workers are forked from, and what others copy from."""
        if self.copies is not None:
            await self.copies.close()
        await self.local.close()


def held_workers(config: GatewayConfig, host: int) -> HeldWorkers:
    """Those of one of these hosts, to be held there. Raises ConfigError."""
    spool, hosts = _require_spool(config), config.engine.hosts
    local, copies = local_workers(config, hosts[host]), _copies(config, spool, host)
    same, first = same_on_hosts(config, OF_A_HOST), sum(hosts[:host])
    shares = shares_of(config.worker_places, config.replicas)
    held = {
        number: WorkerHost(local, host, first - share.start, spool, same, copies)
        for number, share in enumerate(shares)
        if by_host(share, hosts)[host]
    }
    return HeldWorkers(local, copies, held)


def _copies(config: GatewayConfig, spool: Path, host: int) -> SpoolCopies | None:
    """Of the spool; None where its path is here too."""
    if config.engine.shared_spool:
        return None
    by_tree = 0 < config.engine.copies_fan_out < len(config.engine.hosts) - 1
    directory = spool.with_name(f"{spool.name}-host-{host}")
    return SpoolCopies(spool, directory, host, config.security if by_tree else None)


def _require_spool(config: GatewayConfig) -> Path:
    if config.spool is None:
        raise ConfigError(
            "engine workers on several hosts load weights from the gateway's spool",
            seen=f"gateway.engine.hosts={list(config.engine.hosts)}, gateway.spool_dir is empty",
            allowed="gateway.spool_dir, on a path that all hosts share where engine.shared_spool",
        )
    return config.spool
