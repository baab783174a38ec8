"""A step of open traffic: groups that agents opened themselves, stamped with the step that finds
them closed.

Owns which groups a step has taken; a repeated call for the step is answered with the same ones.
Nobody starts a sample here: agents come when they like.
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

STEPS_REMEMBERED = 4
log = get_logger(__name__)


@dataclass(eq=False)
class _Taken:
    """Groups of one step, with what became of their sessions."""

    groups: dict[str, list[rpb.SampleFinished]] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class OpenRuns:
    """Steps of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._steps: OrderedDict[tuple[str, int], _Taken] = OrderedDict()
        self._turns = StepTurns(gateway.agents.groups)

    async def run(self, request: rpb.RunTasksRequest) -> AsyncGenerator[rpb.RunTasksResponse]:
        """Closed groups with their sessions as they are taken, then the totals."""
        gateway, step = self._gateway, request.context.step
        agents = gateway.agents
        agents.open_step, agents.captures = step, gateway.captures if request.capture else None
        totals = Totals((), (), gateway.router.count, asyncio.get_running_loop().time())
        taken = await self._taken(request)
        async with taken.turn:  # a caller that came back waits until the call before has let go
            for group_id, samples in list(taken.groups.items()):
                for news in totals.group(group_id, samples):
                    yield news
            async with (
                IdleWorkers(gateway.router, gateway.config.release_after_s) as idle,
                self._turns.taken(step) as turn,
            ):
                while len(taken.groups) < request.open_groups:
                    await first_of(turn.comes(), idle.lent(), gateway.weights.damaged())
                    while (worker := idle.pop()) is not None:
                        yield rpb.RunTasksResponse(share=totals.share(worker))
                    if (group := turn.pop()) is not None:
                        samples = self._take(taken, group, step)
                        for news in totals.group(group.group_id, samples):
                            yield news

        yield rpb.RunTasksResponse(finished=await totals.closing(gateway))

    def _take(self, taken: _Taken, group: OpenGroup, step: int) -> list[rpb.SampleFinished]:
        """The samples of a group that the step now has; none of one that earned nothing."""
        samples = self._stamp(group, step)
        if not group.scored:
            log.info(
                "a group closed without a reward", group=group.group_id, sessions=len(group.members)
            )
            return []
        taken.groups[group.group_id] = samples
        return samples

    def _stamp(self, group: OpenGroup, step: int) -> list[rpb.SampleFinished]:
        """The group's samples go to the stream as those of this step."""
        for member in group.members:
            self._gateway.agents.put(
                member.session, [restamped(one, step) for one in member.samples]
            )
        return [
            sample_finished(member.session, member.session.worker_index or 0, AGENT, "stop")
            for member in group.members
        ]

    async def _taken(self, request: rpb.RunTasksRequest) -> _Taken:
        key = (request.context.run_id, request.context.step)
        taken = self._steps.get(key)
        if taken is None:
            before: dict[str, list[rpb.SampleFinished]] = defaultdict(list)
            for _, branches in sorted((await self._gateway.outbox.finals(*key)).items()):
                sample = recorded_sample(branches, AGENT, finish="stop")
                before[sample.group_id].append(sample)
            taken = self._steps.setdefault(key, _Taken(before))
            if len(self._steps) > STEPS_REMEMBERED:
                self._steps.popitem(last=False)
        return taken
