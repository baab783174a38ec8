"""Shares the groups that agents opened at several gateways among the steps that collect at the same
time: the requested number for each step, the earliest step first.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from paceline.rpc import responses, rpc_errors
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.trajectory_pb2 import CommandContext

_ASSIGN_DEADLINE_S = 30.0


@dataclass(eq=False)
class GroupsOfStep:
    """A step that needs groups."""

    rollouts: Sequence[Any]  # the stubs of the gateways
    context: CommandContext
    wanted: int
    assigned: dict[int, int] = field(default_factory=dict)  # by gateway
    whole: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lacking(self) -> int:
        """Number of missing groups."""
        return self.wanted - sum(self.assigned.values())

    async def assign(self, number: int, most: int, *, last: bool = False) -> None:
        """Assigns up to `most` closed groups of a gateway; `last` ends its RunTasks call."""
        request = rpb.AssignGroupsRequest(context=self.context, most=most, last=last)
        with rpc_errors():
            answer = await self.rollouts[number].AssignGroups(request, timeout=_ASSIGN_DEADLINE_S)
        self.assigned[number] = answer.assigned
        if self.lacking <= 0:
            self.whole.set()


class OpenSteps:
    """The steps of one run. One step at a time gets groups, so no step gets too many."""

    def __init__(self) -> None:
        self._steps: list[GroupsOfStep] = []
        self._turn = asyncio.Lock()

    async def begin(self, rollouts: Sequence[Any], request: rpb.RunTasksRequest) -> GroupsOfStep:
        """A step, with the groups of earlier calls for it. Raises errors of the gateways."""
        step = GroupsOfStep(rollouts, request.context, request.open_groups)
        async with self._turn:
            for number in range(len(rollouts)):
                await step.assign(number, 0)
        return step

    async def collect(self, step: GroupsOfStep) -> None:
        """Returns when a step has all its groups and every gateway has recorded them. Raises errors
        of the gateways.
        """
        self._steps.append(step)
        self._steps.sort(key=lambda one: one.context.step)
        numbers = range(len(step.rollouts))
        watches = [asyncio.create_task(self._watch(step.rollouts, number)) for number in numbers]
        whole = asyncio.create_task(step.whole.wait())
        try:
            done, _ = await asyncio.wait({whole, *watches}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._steps.remove(step)
            async with self._turn:  # an assignment that is cut off would not be counted
                for task in (whole, *watches):
                    task.cancel()
            await asyncio.gather(whole, *watches, return_exceptions=True)
        async with self._turn:
            for number in numbers:
                await step.assign(number, 0, last=True)
        for number in numbers:  # groups that waited for a later step
            await self._share_out(number)

    async def _watch(self, rollouts: Sequence[Any], number: int) -> None:
        """Shares out the groups that close at a gateway, until cancelled."""
        with rpc_errors():
            call = rollouts[number].WatchGroups(rpb.WatchGroupsRequest())
            async with aclosing(responses(call)) as news:
                async for _ in news:
                    await self._share_out(number)

    async def _share_out(self, number: int) -> None:
        async with self._turn:
            for step in [*self._steps]:
                if step.lacking > 0:
                    await step.assign(number, step.lacking)
