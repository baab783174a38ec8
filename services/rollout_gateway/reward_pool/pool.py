"""Joins the cluster that has started this gateway, for the slots of its pool of rewards."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any

from paceline.cluster.actor import ADDRESS_VARIABLE, travelling
from paceline.cluster.joined import joined
from paceline.cluster.pools import REWARD
from paceline.errors import Unavailable
from paceline.services.rollout_gateway.config import GatewayConfig, SandboxConfig
from paceline.services.rollout_gateway.reward_pool.host import HostOrder, SlotHost
from paceline.services.rollout_gateway.reward_pool.slot import PoolSlot
from paceline.services.rollout_gateway.rewards.processes.child import STOPPED

_THREADS = 8
"""Calls that an actor takes at once: a child's, the reward model's, a sandbox's, and their ends."""


class RewardPool:
    """Slots that are there between start and stop."""

    def __init__(self, address: str, run_id: str, count: int, config: SandboxConfig) -> None:
        self._address = address
        self._name = f"{run_id}/{REWARD}"
        self._sandbox = config
        self._joined = AsyncExitStack()
        self._ray: Any = None
        self._group: Any = None
        self.slots = [PoolSlot(self._placed, number, count) for number in range(count)]

    async def start(self, *, allow_insecure: bool = False) -> None:
        """Raises as joined, and Unavailable where nobody has reserved the pool."""
        self._ray = await self._joined.enter_async_context(
            joined(self._address, allow_insecure=allow_insecure)
        )
        try:
            find = self._ray.util.get_placement_group
            self._group = await asyncio.to_thread(find, self._name)
        except ValueError as error:
            await self._joined.aclose()
            raise Unavailable("the pool of rewards is not reserved", seen=self._name) from error

    async def stop(self) -> None:
        """Ends all that runs on the slots."""
        await asyncio.gather(*(slot.close() for slot in self.slots))
        await self._joined.aclose()

    def _placed(self, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._ray is None:
            raise Unavailable(STOPPED)
        environment = {**travelling(), "CUDA_VISIBLE_DEVICES": ""}  # the pool has no GPUs
        order = HostOrder(os.getcwd(), environment, self._sandbox.model_dump())
        made = self._ray.remote(SlotHost).options(
            num_cpus=0,
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
        )
        return made.remote(order.text())


def reward_pool(config: GatewayConfig) -> RewardPool | None:
    """The pool that a gateway of a run on Ray has asked for; else None: rewards are scored beside
    it.
    """
    address, count = os.environ.get(ADDRESS_VARIABLE, ""), config.rewards.ray_cpus
    if not address or not count:
        return None
    return RewardPool(address, config.run.id, count, config.rewards.sandbox)
