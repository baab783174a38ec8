"""Says what a run asks of a cluster: pools of slots, and who of its services is on which.

A pool is a placement group on one node, with a bundle for each worker: the slots of a
tensor-parallel group are never apart. Services that compute on the same slots in turns share a
pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.local.services import SERVICES
from paceline.plugins import import_object

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
        """Of its node, by kind of resource."""
        kinds = sorted({kind for bundle in self.bundles for kind in bundle})
        return {kind: sum(bundle.get(kind, 0.0) for bundle in self.bundles) for kind in kinds}


def pools_of(files: Sequence[Any], overrides: Sequence[str]) -> list[Pool]:
    """The pools of a run with these settings.

    Colocated, rollouts, policy and drafter take turns on the same slots. Where the learner has
    slots of its own, both trainers are on the node of those.
    """
    found = {
        spec.name: load_config(import_object(spec.settings), spec.name, files, overrides)
        for spec in SERVICES
        if spec.settings
    }
    gateway, coordinator = found["gateway"], found["coordinator"]
    kind = GPU if _on_gpus(found) else CPU
    worker = {kind: float(coordinator.slots_per_worker)}
    rollout = (worker,) * gateway.worker_count
    learners = ({kind: 1.0},) * coordinator.learner_slots
    trainers = ("policy_trainer", "drafter_trainer")
    pools = [Pool(CONTROL, ("redis", "redis_features", "coordinator"))]
    if learners:
        return [*pools, Pool(ROLLOUT, ("gateway",), rollout), Pool(POLICY, trainers, learners)]
    return [*pools, Pool(ROLLOUT, ("gateway", *trainers), rollout)]


def _on_gpus(found: Mapping[str, Any]) -> bool:
    engine = found["gateway"].engine
    on_gpus = engine.kind == "sglang" and engine.sglang.device != "cpu"
    return on_gpus or "cuda" in (found["policy_trainer"].device, found["drafter_trainer"].device)


def check_room(pools: Sequence[Pool], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError where no node has what a pool asks for, whoever else is on it, or all
    together have less than all pools.
    """
    for kind in (CPU, GPU):
        wanted = [pool.asks.get(kind, 0.0) for pool in pools]
        there = [node.get(kind, 0.0) for node in nodes]
        largest = max(wanted)
        if largest > max(there, default=0.0) or sum(wanted) > sum(there):
            raise ConfigError(
                "the cluster has fewer slots than this run asks for; set gateway.engine.workers",
                seen=f"{sum(wanted):g} {kind}, {largest:g} of them on one node",
                allowed=f"nodes with {', '.join(f'{one:g}' for one in there)} {kind}",
            )
