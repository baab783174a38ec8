"""The nodes of a cluster, their pools, and their addresses.

A pool is a placement group on one node. So the slots of a tensor-parallel
group share a node. Services that take turns on the same slots share a pool.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.addresses import spelled
from paceline.cluster.keeper import node_address
from paceline.config import AddressesConfig, ServiceConfig
from paceline.errors import ConfigError
from paceline.local import services
from paceline.report.machine import versions
from paceline.rpc.security import check_events, check_security

CONTROL, ROLLOUT, POLICY = "control", "rollout", "policy"
CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots that are reserved together, and the services on their node."""

    name: str
    services: tuple[str, ...]
    asks: Mapping[str, float] = field(default_factory=dict)  # empty: on the driver's node


def pools_of(files: Sequence[Path], overrides: Sequence[str]) -> list[Pool]:
    """The pools of a run with these settings.

    In a colocated run, rollouts, policy and drafter take turns on the slots of gateway 0. If the
    learner has its own slots, both trainers run on the learner's node. Each further gateway, and
    each further node of the policy trainer, has a pool for itself. Raises ConfigError for invalid
    settings.
    """
    found = services.settings_of_run(files, overrides)
    gateway, coordinator = found["gateway"], found["coordinator"]
    engine = gateway.engine  # SGLang's default device counts as a GPU on a cluster
    for_sglang = engine.kind == "sglang" and engine.sglang.device != "cpu"
    kind = GPU if for_sglang or services.gpu_settings(found) else CPU
    rollout = {kind: float(coordinator.slots_per_worker * gateway.worker_count)}
    policy_nodes = coordinator.run.policy_nodes
    learners = {kind: coordinator.learner_slots / policy_nodes}
    trainers = ("policy_trainer", "drafter_trainer")
    control = Pool(CONTROL, ("redis", "redis_features", "coordinator"))
    if coordinator.learner_slots:
        ranks = [
            Pool(f"{POLICY}-{node}", (services.numbered(services.POLICY_TRAINER, node),), learners)
            for node in range(1, policy_nodes)
        ]
        apart = [Pool(ROLLOUT, (services.GATEWAY,), rollout), *ranks]
        apart.append(Pool(POLICY, trainers, learners))
    else:
        apart = [Pool(ROLLOUT, (services.GATEWAY, *trainers), rollout)]
    more = [
        Pool(f"{ROLLOUT}-{number}", (services.numbered(services.GATEWAY, number),), rollout)
        for number in range(1, len(gateway.addresses.gateways))
    ]
    return [control, *apart, *more]


def check_room(pools: Sequence[Pool], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError if a pool exceeds every node, or all pools together exceed the cluster.
    The current use of the nodes is ignored.
    """
    for kind in (CPU, GPU):
        wanted = {pool.name: pool.asks.get(kind, 0.0) for pool in pools}
        there = [node.get(kind, 0.0) for node in nodes]
        largest = max(wanted, key=lambda name: wanted[name])
        if wanted[largest] <= max(there, default=0.0) and sum(wanted.values()) <= sum(there):
            continue
        policy = largest.startswith(POLICY)
        setting = (
            "run.policy_nodes, coordinator.learner_slots" if policy else "gateway.engine.workers"
        )
        raise ConfigError(
            "the cluster has fewer slots than this run needs; a gateway's workers share one node, "
            f"and the policy's ranks share run.policy_nodes nodes; set {setting}",
            seen=f"{sum(wanted.values()):g} {kind}, {wanted[largest]:g} of them on one node",
            allowed=f"nodes with {', '.join(f'{one:g}' for one in there)} {kind}",
        )


def look(shared: str) -> tuple[str, dict[str, str], str]:
    """Task on a node: returns its address, its versions, and the text of a file ("" if absent)."""
    path = Path(shared)
    held = path.read_text(encoding="utf-8") if path.is_file() else ""
    return node_address(), versions(), held


def compare(pool: str, own: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raises ConfigError if the pool's node has other versions."""
    for name in ("python", "paceline", "torch"):
        if name in own and name in there and own[name] != there[name]:
            message = f"the node of pool {pool} has another {name}"
            raise ConfigError(message, seen=there[name], allowed=own[name])


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
    for spec in services.services_of(len(before.gateways)):
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
        message = "a run on several nodes needs a Redis that all of them reach"
        seen = "redis.durable_url is empty"
        raise ConfigError(message, seen=seen, allowed="its URL, with a password")
    for spec in services.services_of(len(config.addresses.gateways)):
        if spec.address_key:
            check_security(config.addresses.of(spec.address_key), config.security)
    check_events(config.addresses.events, config.security)
