"""Steps of open traffic: a step takes the closed groups that agents opened themselves, and stamps
them with its number.

A repeated call for a step returns the same groups. No sample starts here; agents open sessions at
any time. In a run with several gateways, the coordinator assigns each gateway's groups to the step.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from paceline.services.rollout_gateway.background import first_of
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.runs.idle import IdleWorkers
from paceline.services.rollout_gateway.runs.sample import AGENT, recorded_sample, sample_finished
from paceline.services.rollout_gateway.runs.totals import Totals
from paceline.services.rollout_gateway.runs.turns import StepTurns
from paceline.services.rollout_gateway.sessions.open_groups import OpenGroup
from paceline.services.rollout_gateway.sessions.samples import restamped
from paceline.telemetry import get_logger
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.trajectory_pb2 import CommandContext

STEPS_REMEMBERED = 4
log = get_logger(__name__)


@dataclass(eq=False)
class _Taken:
    """Groups of one step, with the outcomes of their sessions."""

    groups: dict[str, list[rpb.SampleFinished]] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    whole: bool = False  # all groups of the step are assigned
    given: asyncio.Event = field(default_factory=asyncio.Event)  # set when groups are assigned

    async def more(self) -> None:
        """Return once more groups, or all groups, are assigned."""
        await self.given.wait()


class OpenRuns:
    """The open steps of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._steps: OrderedDict[tuple[str, int], _Taken] = OrderedDict()
        self._turns = StepTurns(gateway.agents.groups)

    async def run(self, request: rpb.RunTasksRequest) -> AsyncGenerator[rpb.RunTasksResponse]:
        """Yield closed groups with their sessions as the step takes them, then the totals."""
        gateway, step = self._gateway, request.context.step
        agents = gateway.agents
        agents.open_step, agents.captures = step, gateway.captures if request.capture else None
        assigned = request.assigned
        totals = Totals((), (), (), asyncio.get_running_loop().time())
        taken, told = await self._taken(request.context), 0
        async with (
            taken.turn,  # a repeated call waits until the previous call has ended
            IdleWorkers(gateway.router, gateway.config.release_after_s) as idle,
            self._turns.taken(step) as turn,
        ):
            while True:
                taken.given.clear()
                whole = taken.whole
                while told < len(taken.groups):
                    group_id, samples = [*taken.groups.items()][told]
                    told += 1
                    for news in totals.group(group_id, samples):
                        yield news
                if whole or (not assigned and told >= request.open_groups):
                    break
                comes = taken.more() if assigned else turn.comes()
                await first_of(comes, idle.lent(), gateway.weights.damaged())
                while (worker := idle.pop()) is not None:
                    yield rpb.RunTasksResponse(share=totals.share(worker))
                if not assigned and (group := turn.pop()) is not None:
                    self._take(taken, group, step)

        yield rpb.RunTasksResponse(finished=await totals.closing(gateway))

    async def assign(self, context: CommandContext, most: int, *, last: bool) -> int:
        """Assign at most `most` closed groups to the step; `last` marks the final assignment.

        Returns the number of this gateway's groups in the step.
        """
        taken, groups = await self._taken(context), self._gateway.agents.groups
        wanted = len(taken.groups) + most
        while len(taken.groups) < wanted and (group := groups.pop()) is not None:
            self._take(taken, group, context.step)
        taken.whole = last
        taken.given.set()
        return len(taken.groups)

    def _take(self, taken: _Taken, group: OpenGroup, step: int) -> None:
        """Add a group to the step, unless it has no reward."""
        samples = self._stamp(group, step)
        if group.scored:
            taken.groups[group.group_id] = samples
            return
        log.info(
            "a group closed without a reward", group=group.group_id, sessions=len(group.members)
        )

    def _stamp(self, group: OpenGroup, step: int) -> list[rpb.SampleFinished]:
        """Send the group's samples to the stream with this step's number."""
        for member in group.members:
            self._gateway.agents.put(
                member.session, [restamped(one, step) for one in member.samples]
            )
        return [
            sample_finished(member.session, member.session.worker_index or 0, AGENT, "stop")
            for member in group.members
        ]

    async def _taken(self, context: CommandContext) -> _Taken:
        key = (context.run_id, context.step)
        taken = self._steps.get(key)
        if taken is None:
            before: dict[str, list[rpb.SampleFinished]] = defaultdict(list)
            for _, branches in sorted((await self._gateway.outbox.finals(*key)).items()):
                sample = recorded_sample(branches, AGENT, finish="stop")
                if self._gateway.names.owns(sample.session_id):
                    before[sample.group_id].append(sample)
            taken = self._steps.setdefault(key, _Taken(before))
            if len(self._steps) > STEPS_REMEMBERED:
                self._steps.popitem(last=False)
        return taken
