"""RunTasks over all replicas: each replica gets neighbouring tasks, and their messages become one
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from paceline.errors import InvalidInput, Unavailable
from paceline.messages import versions_to_proto
from paceline.rpc import rpc_errors
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.replicas import merge
from paceline.services.rollout_gateway.replicas.fleet import ReplicaFleet
from paceline.services.rollout_gateway.replicas.open_steps import OpenSteps
from paceline.services.rollout_gateway.replicas.streams import merged
from paceline.services.rollout_gateway.replicas.weights import ReplicaWeights
from paceline.v1 import rollout_pb2 as rpb


class SplitRuns:
    """All RunTasks calls of one head."""

    def __init__(self, fleet: ReplicaFleet, weights: ReplicaWeights) -> None:
        self._fleet = fleet
        self._weights = weights
        self._open = OpenSteps(fleet)

    async def run(
        self, request: rpb.RunTasksRequest, accepted: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[rpb.RunTasksResponse]:
        """Samples, groups and shares as the replicas report them, then the totals of all.
        `accepted` is awaited when all replicas have accepted their parts.

        Raises Unavailable as soon as a replica is lost. The other replicas continue, and a repeated
        call gets their results.
        """
        replicas, collecting = self._fleet.replicas, bool(request.open_groups and not request.tasks)
        for replica in replicas:
            replica.require_up()
        if collecting:
            parts = dict.fromkeys(range(len(replicas)), request)
            step = await self._open.begin(request)
        else:
            parts = merge.split_tasks(request, [replica.place for replica in replicas])
        if not parts:
            raise InvalidInput("the call has no tasks", seen=0, allowed="1 or more")
        calls = {number: replicas[number].rollout.RunTasks(part) for number, part in parts.items()}
        beside: list[asyncio.Task[None]] = []
        try:
            with rpc_errors():
                await asyncio.gather(*(call.wait_for_connection() for call in calls.values()))
            await accepted()
            if collecting:
                beside.append(asyncio.create_task(self._open.collect(step)))
            async with aclosing(self._merged(calls, beside)) as responses:
                async for news in responses:
                    yield news
        except Unavailable:
            await self._weights.look_for_damage()
            raise
        finally:
            await cancel(*beside)
            for call in calls.values():
                call.cancel()

    async def _merged(
        self, calls: dict[int, Any], beside: list[asyncio.Task[None]]
    ) -> AsyncGenerator[rpb.RunTasksResponse]:
        for number, replica in enumerate(self._fleet.replicas):
            for worker in () if number in calls else range(replica.place.workers):
                share = rpb.ShareDone(worker_index=replica.place.first_worker + worker)
                yield rpb.RunTasksResponse(share=share)
        done: dict[int, rpb.TasksFinished] = {}
        async with aclosing(merged(calls, beside=beside)) as stream:
            async for number, news in stream:
                if news.WhichOneof("event") == "finished":
                    done[number] = news.finished
                else:
                    yield merge.renumbered(news, self._fleet.replicas[number].place)
        if missing := sorted(calls.keys() - done.keys()):
            raise Unavailable("replicas ended before their tasks", seen=missing)
        last = merge.finished(done[number] for number in sorted(done))
        last.versions.CopyFrom(versions_to_proto(self._weights.versions))
        yield rpb.RunTasksResponse(finished=last)
