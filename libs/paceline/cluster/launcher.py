"""Launches a run on a Ray cluster: reserves its pools, checks their nodes, and creates keepers."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.joined import joined
from paceline.cluster.keeper import DESERTED_S, KeptPool, PoolKeeper, PoolOrder, travelling
from paceline.cluster.nodes import GPU, Pool, addresses, check_room, compare, look, require_ways
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import ConfigError, DeadlineExceeded, FailedPrecondition
from paceline.local.launch import ChildEvent, Launch, Supervised
from paceline.local.patience import patient, within
from paceline.local.services import service
from paceline.report.machine import versions

_RESERVED_S = 60.0
_LOOKED_AT_S = 60.0
_THREADS = 8
"""Concurrent calls that a keeper accepts."""


@dataclass(frozen=True, slots=True)
class RunOnCluster:
    """A run for the cluster."""

    config: ServiceConfig  # the shared sections
    files: Sequence[Path]  # TOML, absolute
    overrides: Sequence[str]
    directory: Path  # absolute path of the run's files
    pools: Sequence[Pool]
    health_s: float  # seconds for the start of a service
    room_s: float = 0.0  # seconds to wait for slots that the cluster lacks

    def actor(self, service: str) -> str:
        """Actor name of a service's keeper; for "" the prefix of all names."""
        return f"{self.config.run.id}/{service}"


@asynccontextmanager
async def on_cluster(
    run: RunOnCluster, address: str | None, on_event: Callable[[ChildEvent], None]
) -> AsyncIterator[_ClusterRun]:
    """Yields a launcher of the run for the block, and releases the run's pools afterwards.

    Raises before any start. ConfigError: no Ray, other versions, too few slots, a node without the
    run's directory, or services that cannot reach each other or lack security. Unavailable: no
    cluster. DeadlineExceeded: other users hold the slots, or a node does not answer.
    FailedPrecondition: the run is already on the cluster.
    """
    async with joined(address, allow_insecure=run.config.security.allow_insecure) as ray:
        launcher = _ClusterRun(ray, run, on_event)
        await launcher.require_name()
        await launcher.find_room()
        try:
            await launcher.reserve()
            await launcher.look_at_nodes()
            if launcher.addresses:
                settings = [*run.overrides, *launcher.addresses]
                require_ways(load_config(ServiceConfig, "local", run.files, settings))
            yield launcher
        finally:
            await asyncio.to_thread(launcher.give_back)


class _ClusterRun:
    """Creates keepers; a Supervisor calls `launches` and `keep`."""

    def __init__(self, ray: Any, run: RunOnCluster, on_event: Callable[[ChildEvent], None]) -> None:
        self._ray = ray
        self._run = run
        self._on_event = on_event
        self._groups: dict[str, Any] = {}  # placement group by pool
        self._hosts: dict[str, str] = {}  # node address by pool
        self._lost: set[str] = set()  # addresses of lost nodes

    async def require_name(self) -> None:
        """Raises FailedPrecondition if the run is already on the cluster.

        Waits for a run without a starter: its keepers end by themselves.
        """
        end = asyncio.get_running_loop().time() + patient(2 * DESERTED_S)
        while names := await asyncio.to_thread(self._names):
            silent = [await asyncio.to_thread(self._silent_s, name) for name in names]
            if min(silent) < DESERTED_S / 4 or asyncio.get_running_loop().time() > end:
                message = "a run of this id is on the cluster already; stop that one, or set run.id"
                raise FailedPrecondition(message, reason="RUN_OWNED", seen=", ".join(sorted(names)))
            await asyncio.sleep(1.0)  # Ray does not notify of the end of other clients' actors

    def _names(self) -> list[str]:
        found = self._ray.util.list_named_actors()
        return [name for name in found if name.startswith(self._run.actor(""))]

    def _silent_s(self, name: str) -> float:
        try:
            keeper = self._ray.get_actor(name)
            return float(self._ray.get(keeper.silent_s.remote(), timeout=patient(_LOOKED_AT_S)))
        except (ValueError, self._ray.exceptions.RayActorError):  # the process has just ended
            return float("inf")

    async def find_room(self) -> None:
        """Raises ConfigError if the cluster's nodes are too few or too small."""
        end = asyncio.get_running_loop().time() + patient(self._run.room_s)
        while True:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            try:
                return check_room(self._run.pools, nodes)
            except ConfigError:
                if asyncio.get_running_loop().time() >= end:
                    raise
                await asyncio.sleep(1.0)  # Ray does not notify of new nodes

    async def reserve(self) -> None:
        """Reserves the slots of all pools. Raises DeadlineExceeded while other users hold them."""
        from ray.util.placement_group import placement_group

        for pool in self._run.pools:
            if pool.asks:
                name = self._run.actor(pool.name)
                self._groups[pool.name] = placement_group([dict(pool.asks)], name=name)
        for name, group in self._groups.items():
            if not await asyncio.to_thread(group.wait, patient(_RESERVED_S)):
                message = f"no node has the slots of pool {name} free; others use them"
                seen = f"{patient(_RESERVED_S):.0f} s"
                raise DeadlineExceeded(message, seen=seen, allowed="less for this run, or its turn")

    async def look_at_nodes(self) -> None:
        """Raises ConfigError if a node runs another Python or Paceline version, or lacks the run's
        directory.
        """
        path, nonce = self._run.directory / ".shared", secrets.token_hex(8)
        path.write_text(nonce, encoding="utf-8")
        own = versions()
        try:
            for pool in self._run.pools:
                task = self._ray.remote(num_cpus=0)(look).options(**self._place(pool))
                looked = within(_LOOKED_AT_S, task.remote(str(path)), "a node does not answer")
                host, found, read = await looked
                compare(pool.name, own, found)
                if pool.services:
                    self._hosts[pool.name] = host
                if read != nonce:
                    message = f"the node of pool {pool.name} does not have the run's directory"
                    seen = self._run.directory
                    raise ConfigError(message, seen=seen, allowed="a path that all nodes share")
        finally:
            path.unlink(missing_ok=True)

    @property
    def addresses(self) -> list[str]:
        """Address settings of services on several nodes."""
        return addresses(self._run.config.addresses, self._run.pools, self._hosts)

    def launches(self) -> list[Launch]:
        """A launch for each keeper. The service that ends the run has its own keeper, so that it is
        stopped first.
        """
        return [Launch(name, ("",), ends_run=ends) for name, (ends, _, _) in self._kept().items()]

    def keep(self, launch: Launch, needs: Sequence[Supervised]) -> KeptPool:
        """Creates the handle that keeps the services of a launch running."""
        _, pool, services = self._kept()[launch.name]
        order = PoolOrder(
            launch.name,
            services,
            str(self._run.directory),
            os.getcwd(),
            [str(path) for path in self._run.files],
            [*self._run.overrides, *self.addresses],
            travelling(),
            self._run.health_s,
            self._hosts[pool.name],
        )
        return KeptPool(launch, order, self._placed, self._on_event, self._lost)

    def _kept(self) -> dict[str, tuple[bool, Pool, list[str]]]:
        """By name of the keeper: whether it ends the run, its pool and its services."""
        found = {}
        for ends in (False, True):
            for pool in self._run.pools:
                names = [name for name in pool.services if service(name).ends_run == ends]
                if names:
                    found[names[0] if ends else pool.name] = ends, pool, names
        return found

    def _placed(self, order: PoolOrder) -> Any:
        ends, pool, _ = self._kept()[order.name]
        made = self._ray.remote(PoolKeeper).options(
            name=self._run.actor(order.name),
            lifetime="detached",
            max_concurrency=_THREADS,
            num_cpus=0,
            num_gpus=0 if ends else pool.asks.get(GPU, 0),
            **self._place(pool),
        )
        return made.remote(order)

    def _place(self, pool: Pool) -> dict[str, Any]:
        from ray.util import scheduling_strategies as strategies

        group = self._groups.get(pool.name)
        if group is None:
            own = self._ray.get_runtime_context().get_node_id()
            node = strategies.NodeAffinitySchedulingStrategy(own, soft=False)
            return {"scheduling_strategy": node}
        return {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, 0)}

    def give_back(self) -> None:
        """Kills remaining keepers and releases the slots."""
        for name in self._names():
            try:
                self._ray.kill(self._ray.get_actor(name))
            except ValueError:  # the process has just ended
                continue
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)
