"""Computes the slot pools of a run on a cluster and assigns services to pools.

A pool is a placement group on one node. So the slots of a tensor-parallel
group share a node. Services that take turns on the same slots share a pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.local.run_settings import gpu_settings, settings_of_run
from paceline.local.services import GATEWAY, gateway_name

CONTROL, ROLLOUT, POLICY = "control", "rollout", "policy"
CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots that are reserved together, and the services on their node."""

    name: str
    services: tuple[str, ...]
    bundles: tuple[Mapping[str, float], ...] = ()  # () reserves nothing: the driver's node

    @property
    def asks(self) -> dict[str, float]:
        """Total resources of the pool, by kind."""
        kinds = sorted({kind for bundle in self.bundles for kind in bundle})
        return {kind: sum(bundle.get(kind, 0.0) for bundle in self.bundles) for kind in kinds}


def pools_of(files: Sequence[Path], overrides: Sequence[str]) -> list[Pool]:
    """The pools of a run with these settings.

    In a colocated run, rollouts, policy and drafter take turns on the slots of gateway 0. If the
    learner has its own slots, both trainers run on the learner's node. Each further gateway has a
    pool for itself. Raises ConfigError for invalid
    settings.
    """
    found = settings_of_run(files, overrides)
    gateway, coordinator = found["gateway"], found["coordinator"]
    engine = gateway.engine  # SGLang's default device counts as a GPU on a cluster
    for_sglang = engine.kind == "sglang" and engine.sglang.device != "cpu"
    kind = GPU if for_sglang or gpu_settings(found) else CPU
    worker = {kind: float(coordinator.slots_per_worker)}
    rollout = (worker,) * gateway.worker_count
    learners = ({kind: 1.0},) * coordinator.learner_slots
    trainers = ("policy_trainer", "drafter_trainer")
    control = Pool(CONTROL, ("redis", "redis_features", "coordinator"))
    if learners:
        apart = [Pool(ROLLOUT, (GATEWAY,), rollout), Pool(POLICY, trainers, learners)]
    else:
        apart = [Pool(ROLLOUT, (GATEWAY, *trainers), rollout)]
    more = [
        Pool(f"{ROLLOUT}-{number}", (gateway_name(number),), rollout)
        for number in range(1, len(gateway.addresses.gateways))
    ]
    return [control, *apart, *more]


def check_room(pools: Sequence[Pool], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError if a pool exceeds every node, or all pools together exceed the cluster.
    The current use of the nodes is ignored.
    """
    for kind in (CPU, GPU):
        wanted = [pool.asks.get(kind, 0.0) for pool in pools]
        there = [node.get(kind, 0.0) for node in nodes]
        largest = max(wanted, default=0.0)
        if largest > max(there, default=0.0) or sum(wanted) > sum(there):
            raise ConfigError(
                "the cluster has fewer slots than this run asks for; set gateway.engine.workers",
                seen=f"{sum(wanted):g} {kind}, {largest:g} of them on one node",
                allowed=f"nodes with {', '.join(f'{one:g}' for one in there)} {kind}",
            )
