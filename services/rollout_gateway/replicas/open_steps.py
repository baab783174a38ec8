"""Assigns closed groups of open traffic to steps, over all replicas: the requested number per step,
the earliest step first.

One step at a time queries the replicas, so no step gets too many groups.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from paceline.services.rollout_gateway.background import first_of
from paceline.services.rollout_gateway.replicas.fleet import ReplicaFleet
from paceline.services.rollout_gateway.replicas.streams import merged
from paceline.v1 import replica_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.trajectory_pb2 import CommandContext

TAKE_DEADLINE_S = 30.0


@dataclass(eq=False)
class CollectingGroups:
    """A step that needs groups."""

    context: CommandContext
    wanted: int
    taken: dict[int, int] = field(default_factory=dict)  # by replica
    whole: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lacking(self) -> int:
        """Number of missing groups."""
        return self.wanted - sum(self.taken.values())


class OpenSteps:
    """The steps of one head. For use on one event loop."""

    def __init__(self, fleet: ReplicaFleet) -> None:
        self._fleet = fleet
        self._steps: list[CollectingGroups] = []
        self._turn = asyncio.Lock()

    async def begin(self, request: rpb.RunTasksRequest) -> CollectingGroups:
        """A step, with the groups of earlier calls for it. Raises Unavailable when a replica is
        lost.
        """
        step = CollectingGroups(request.context, request.open_groups)
        async with self._turn:
            for number in range(len(self._fleet.replicas)):
                await self._take(step, number, 0)
        return step

    async def collect(self, step: CollectingGroups) -> None:
        """Returns when a step has all its groups and every replica has recorded them. Raises
        Unavailable when a replica is lost.
        """
        self._steps.append(step)
        self._steps.sort(key=lambda one: one.context.step)
        try:
            if step.lacking > 0:
                await first_of(self._notice(), _set(step.whole))
        finally:
            self._steps.remove(step)
        async with self._turn:
            for number in range(len(self._fleet.replicas)):
                await self._take(step, number, 0, last=True)
        for number in range(len(self._fleet.replicas)):  # groups that waited for a later step
            await self._share_out(number)

    async def _notice(self) -> None:
        """Assigns groups that close at any replica, until cancelled."""
        replicas = self._fleet.replicas
        calls = {
            number: replica.inner.WatchGroups(pb.WatchGroupsRequest())
            for number, replica in enumerate(replicas)
        }
        async with aclosing(merged(calls, endless=True)) as news:
            async for number, _ in news:
                await self._share_out(number)

    async def _share_out(self, number: int) -> None:
        """Assigns the closed groups of a replica to the steps that need groups."""
        async with self._turn:
            for step in [*self._steps]:
                if step.lacking > 0:
                    await self._take(step, number, step.lacking)

    async def _take(
        self, step: CollectingGroups, number: int, most: int, *, last: bool = False
    ) -> None:
        replica = self._fleet.replicas[number]
        request = pb.TakeGroupsRequest(context=step.context, most=most, last=last)
        answer = await replica.ask(replica.inner.TakeGroups, request, TAKE_DEADLINE_S)
        step.taken[number] = answer.taken
        if step.lacking <= 0:
            step.whole.set()


async def _set(event: asyncio.Event) -> None:
    await event.wait()
