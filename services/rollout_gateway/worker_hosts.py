"""Says which engine workers are on which host, what those of one host are made by, and what hosts
need of each other. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import ConfigError
from paceline.local.forking import Forker
from paceline.plugins import import_object
from paceline.report.machine import same_on_hosts
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engine_settings import engine_settings
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.features.publisher import ROW_DTYPES
from paceline.services.rollout_gateway.workers.hosting import WorkerHost
from paceline.services.rollout_gateway.workers.hosts import WorkerHosts
from paceline.services.rollout_gateway.workers.local import LocalWorkers, RowShape
from paceline.services.rollout_gateway.workers.spool_copies import SpoolCopies
from paceline.weights import Spool

RING_ROWS = 16_384
"""Rows of each worker's ring: eight prefills of 2,048 tokens between two reads, which come with the
tokens of every round.
"""
OF_A_HOST = frozenset({"redis", "security", "telemetry"})
"""Settings that hosts may have each for itself."""


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


def local_workers(config: GatewayConfig, forker: Forker | None = None) -> LocalWorkers:
    """What makes the workers of this host. `forker`: see LocalWorkers."""
    settings, rows = engine_settings(config), row_shape(config)
    return LocalWorkers(config.engine, settings, rows, config.run.heartbeat_s, forker)


def other_hosts(config: GatewayConfig, spool: Spool) -> WorkerHosts | None:
    """The hosts that the gateway's workers are on besides its own, None where there are none.
    Raises ConfigError where they could not load what is pushed.
    """
    if len(config.engine.hosts) < 2:
        return None
    _require_spool(config)
    engine = config.engine
    return WorkerHosts(engine.hosts, row_shape(config), _same(config), spool, engine.copies_fan_out)


def held_workers(config: GatewayConfig, host: int) -> WorkerHost:
    """Those of one of these hosts, to be held there. Raises ConfigError."""
    spool = _require_spool(config)
    first = sum(config.engine.hosts[:host])
    copies = None
    if not config.engine.shared_spool:
        directory, others = (
            spool.with_name(f"{spool.name}-host-{host}"),
            len(config.engine.hosts) - 1,
        )
        tree = 0 < config.engine.copies_fan_out < others
        copies = SpoolCopies(spool, directory, host, config.security if tree else None)
    return WorkerHost(local_workers(config), host, first, spool, _same(config), copies)


def _require_spool(config: GatewayConfig) -> Path:
    if config.spool is None:
        raise ConfigError(
            "engine workers on several hosts load weights from the gateway's spool",
            seen=f"gateway.engine.hosts={list(config.engine.hosts)}, gateway.spool_dir is empty",
            allowed="gateway.spool_dir, on a path that all hosts share where engine.shared_spool",
        )
    return config.spool


def _same(config: GatewayConfig) -> dict[str, str]:
    return same_on_hosts(config, OF_A_HOST)
