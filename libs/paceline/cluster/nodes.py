"""Checks the nodes of a run's pools and computes service addresses across nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.addresses import spelled
from paceline.cluster.keeper import node_address
from paceline.cluster.pools import Pool
from paceline.config import AddressesConfig, ServiceConfig
from paceline.errors import ConfigError
from paceline.local.services import services_of
from paceline.report.machine import versions
from paceline.rpc.security import check_events, check_security


def look(shared: str) -> tuple[str, dict[str, str], str]:
    """Task on a node: returns its address, its versions, and the text of a file ("" if absent)."""
    path = Path(shared)
    held = path.read_text(encoding="utf-8") if path.is_file() else ""
    return node_address(), versions(), held


def compare(pool: str, own: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raises ConfigError if the pool's node has other versions."""
    for name in ("python", "paceline", "torch"):
        if name in own and name in there and own[name] != there[name]:
            raise ConfigError(
                f"the node of pool {pool} has another {name}", seen=there[name], allowed=own[name]
            )


def addresses(
    before: AddressesConfig, pools: Sequence[Pool], hosts: Mapping[str, str]
) -> list[str]:
    """Address settings of the services from the host of each pool.

    Empty if all services are on one node. Otherwise each service listens at its configured port, on
    its node's address.
    """
    if len(set(hosts.values())) == 1:
        return []
    found: dict[str, str | list[str]] = {}
    host_of = {name: hosts[pool.name] for pool in pools for name in pool.services}
    for spec in services_of(len(before.gateways)):
        for key in filter(None, (spec.address_key, *spec.more_address_keys)):
            scheme, slashes, rest = before.of(key).rpartition("//")
            port = rest.rpartition(":")[2]
            address = f"{scheme}{slashes}{spelled(host_of[spec.name])}:{port}"
            name, _, index = key.partition(".")
            found[name] = [*found.get(name, ()), address] if index else address
    return [
        f"addresses.{name}={json.dumps(value) if isinstance(value, list) else value}"
        for name, value in found.items()
    ]


def require_ways(config: ServiceConfig) -> None:
    """Raises ConfigError if services on several nodes cannot reach each other or lack security."""
    if not config.redis.durable_url:
        raise ConfigError(
            "a run on several nodes needs a Redis that all of them reach",
            seen="redis.durable_url is empty",
            allowed="its URL, with a password",
        )
    for spec in services_of(len(config.addresses.gateways)):
        if spec.address_key:
            check_security(config.addresses.of(spec.address_key), config.security)
    check_events(config.addresses.events, config.security)
