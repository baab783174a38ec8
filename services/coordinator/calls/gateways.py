"""Calls all gateways of a run as one. Worker w of the run is worker w % W of gateway w // W, where
each gateway has W workers and numbers them from 0.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from paceline.errors import Unavailable
from paceline.local.patience import cancel
from paceline.messages import merge_arms, stats_from_proto, stats_to_proto
from paceline.rpc import rpc_errors
from paceline.rpc.leases import answers
from paceline.rpc.progress import LONGEST_S, while_moving
from paceline.services.coordinator.calls.base import WORKER_LOST, Calls, each
from paceline.trajectory import SpeculationStats
from paceline.v1 import rollout_pb2 as pb

T = TypeVar("T")


async def ask_all(calls: Calls, method: str, request: Any, deadline_s: float) -> list[Any]:
    """The answers of all gateways to a call of RolloutService. Raises the first failure."""
    with rpc_errors():
        return await each(
            getattr(stub, method)(request, timeout=deadline_s) for stub in calls.peers.rollouts
        )


def by_gateway(workers: Iterable[int], of_each: int) -> dict[int, list[int]]:
    """The gateways' own numbers of these workers, by gateway."""
    found: dict[int, list[int]] = {}
    for worker in workers:
        found.setdefault(worker // of_each, []).append(worker % of_each)
    return found


class TaskCalls:
    """A RunTasks call over all gateways: each runs an equal share of neighbouring tasks, and their
    answers become one stream.
    """

    def __init__(self, calls: Calls, request: pb.RunTasksRequest) -> None:
        self._calls = calls
        several = len(calls.peers.rollouts) > 1
        self._collects = several and bool(request.open_groups and not request.tasks)
        request.assigned = self._collects
        self._parts = split_tasks(request, len(calls.peers.rollouts))
        self._request = request

    async def begin(self) -> None:
        """Returns when all gateways have accepted their parts. Raises the first refusal, and
        TimeoutError after `step_deadline_s` seconds.
        """
        rollouts = self._calls.peers.rollouts
        async with asyncio.timeout(self._calls.config.step_deadline_s):
            if self._collects:
                self._step = await self._calls.open_steps.begin(rollouts, self._request)
            self._running = {
                number: rollouts[number].RunTasks(part, timeout=LONGEST_S)
                for number, part in self._parts.items()
            }
            try:
                with rpc_errors():
                    await each(call.wait_for_connection() for call in self._running.values())
            except BaseException:
                for call in self._running.values():
                    call.cancel()
                raise

    async def news(self) -> AsyncGenerator[tuple[str, Any]]:
        """Yields (name, message) for each response, the last named "finished". Raises the first
        failure, DeadlineExceeded for a gateway without progress; then all calls are cancelled.
        """
        of_each = self._calls.workers_of_each
        for number in set(range(len(self._calls.peers.rollouts))) - {*self._running}:
            for worker in range(of_each):  # a gateway without tasks has free workers
                yield "share", pb.ShareDone(worker_index=number * of_each + worker)
        streams = [self._answers(number, call) for number, call in self._running.items()]
        beside = [self._calls.open_steps.collect(self._step)] if self._collects else []
        totals: dict[int, pb.TasksFinished] = {}
        async with aclosing(merged(streams, beside)) as found:
            async for place, (name, answer) in found:
                if name == "finished":
                    totals[place] = answer
                else:
                    yield name, answer
        yield "finished", summed([totals[place] for place in sorted(totals)])

    async def _answers(self, number: int, call: Any) -> AsyncGenerator[tuple[str, Any]]:
        """The answers of a gateway, with worker numbers of the run."""
        calls, first = self._calls, number * self._calls.workers_of_each
        try:
            async with (
                while_moving(calls.peers.gateways[number], calls.config.step_deadline_s),
                aclosing(answers(call, last="finished")) as stream,
            ):
                async for name, answer in stream:
                    if name in ("sample", "share"):
                        answer.worker_index += first
                    yield name, answer
        except Unavailable as error:
            if error.reason != WORKER_LOST or not (error.seen or "").isdecimal():
                raise
            seen = first + int(error.seen or 0)
            raise Unavailable(error.message, reason=WORKER_LOST, seen=seen) from error


def split_tasks(request: pb.RunTasksRequest, gateways: int) -> dict[int, pb.RunTasksRequest]:
    """The tasks of each gateway with a share, by its number. Without tasks, every gateway gets the
    whole request.
    """
    if gateways == 1 or not request.tasks:
        return dict.fromkeys(range(gateways), request)
    parts: dict[int, pb.RunTasksRequest] = {}
    for index, task in enumerate(request.tasks):
        number = index * gateways // len(request.tasks)
        if number not in parts:
            parts[number] = pb.RunTasksRequest()
            parts[number].CopyFrom(request)
            del parts[number].tasks[:]
        parts[number].tasks.append(task)
    return parts


def summed(parts: Sequence[pb.TasksFinished]) -> pb.TasksFinished:
    """The totals of all parts, in the order of their tasks. The regret is left out."""
    if len(parts) == 1:
        return parts[0]
    stats = sum((stats_from_proto(part.speculation) for part in parts), SpeculationStats())
    return pb.TasksFinished(
        scored=sum(part.scored for part in parts),
        unscored=sum(part.unscored for part in parts),
        response_tokens=sum(part.response_tokens for part in parts),
        rollout_s=max(part.rollout_s for part in parts),
        speculation=stats_to_proto(stats),
        arms=merge_arms(arm for part in parts for arm in part.arms),
        versions=parts[0].versions,
        closed_groups=[group for part in parts for group in part.closed_groups],
    )


async def merged(
    streams: Sequence[AsyncGenerator[T]], beside: Iterable[Coroutine[Any, Any, None]] = ()
) -> AsyncGenerator[tuple[int, T]]:
    """Items of all streams in order of arrival, each with the place of its stream, until all
    streams and the coroutines in `beside` have ended. Raises the first failure.
    """
    found: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()

    async def read(place: int, stream: AsyncGenerator[T]) -> None:
        async with aclosing(stream):
            async for item in stream:
                found.put_nowait((place, item))

    reading = [read(*one) for one in enumerate(streams)]
    tasks = [asyncio.create_task(one) for one in (*reading, *beside)]
    for task in tasks:
        task.add_done_callback(found.put_nowait)
    left = len(tasks)
    try:
        while left:
            item = await found.get()
            if isinstance(item, asyncio.Task):
                item.result()
                left -= 1
            else:
                yield item
    finally:
        await cancel(*tasks)
