"""A step of open traffic: groups that agents opened themselves, stamped with the step that finds
them closed.

Owns which groups a step has taken; a repeated call for the step is answered with the same ones.
Nobody starts a sample here: agents come when they like.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.telemetry import get_logger
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.background import first_of
from rollout_gateway.gateway import Gateway
from rollout_gateway.runs.idle import IdleWorkers
from rollout_gateway.runs.sample import AGENT, sample_finished
from rollout_gateway.runs.totals import Totals
from rollout_gateway.sessions.open_groups import OpenGroup
from rollout_gateway.sessions.samples import restamped

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

    async def run(self, request: rpb.RunTasksRequest) -> AsyncGenerator[rpb.RunTasksResponse]:
        """Sessions of closed groups as they are taken, then the totals."""
        gateway, step = self._gateway, request.context.step
        agents = gateway.agents
        agents.open_step, agents.captures = step, gateway.captures if request.capture else None
        totals = Totals((), (), gateway.router.count, asyncio.get_running_loop().time())
        taken = await self._taken(request)
        async with taken.turn:  # a caller that came back waits until the call before has let go
            for group_id, samples in list(taken.groups.items()):
                for sample in totals.group(group_id, samples):
                    yield rpb.RunTasksResponse(sample=sample)
            async with IdleWorkers(gateway.router, gateway.config.release_after_s) as idle:
                while len(taken.groups) < request.open_groups:
                    await first_of(agents.groups.closed(), idle.lent())
                    while (worker := idle.pop()) is not None:
                        yield rpb.RunTasksResponse(share=totals.share(worker))
                    group = agents.groups.pop()
                    for sample in (
                        ()
                        if group is None
                        else totals.group(group.group_id, self._take(taken, group, step))
                    ):
                        yield rpb.RunTasksResponse(sample=sample)
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
            records = await self._gateway.outbox.finals(*key)
            taken = self._steps.setdefault(key, _Taken(_from_records(records)))
            if len(self._steps) > STEPS_REMEMBERED:
                self._steps.popitem(last=False)
        return taken


def _from_records(records: Mapping[str, dict[str, Any]]) -> dict[str, list[rpb.SampleFinished]]:
    """What a former process had put under this step; the counters of its sessions are gone."""
    sessions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records.values():
        sessions[record["key"].rpartition("/")[0]].append(record)
    groups: dict[str, list[rpb.SampleFinished]] = defaultdict(list)
    for session_id, branches in sorted(sessions.items()):
        first = branches[0]
        groups[first["group_id"]].append(
            rpb.SampleFinished(
                task_id=first["task_id"],
                group_id=first["group_id"],
                sample_index=first["sample_index"],
                reward=tpb.Reward(
                    value=sum(one["reward"] for one in branches) / len(branches), source=AGENT
                ),
                prompt_tokens=first["tokens"] - first["trained_tokens"],
                response_tokens=sum(one["trained_tokens"] for one in branches),
                finish_reason=tpb.FINISH_REASON_STOP,
                smallest_gap=float("inf"),
                tokens_hash=first["response_hash"] if len(branches) == 1 else "",
                session_id=session_id,
            )
        )
    return dict(groups)
