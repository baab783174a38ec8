"""Several gateways as one: shares of tasks, numbers of workers, totals and progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from paceline.config import AddressesConfig, SecurityConfig
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.rpc import Server
from paceline.services.coordinator.calls.base import Calls, Peers
from paceline.services.coordinator.calls.gateways import (
    TaskCalls,
    by_gateway,
    merged,
    split_tasks,
    summed,
)
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.observed import merge_gateways
from paceline.v1.engine_pb2 import ArmStats
from paceline.v1.progress_pb2 import Part
from paceline.v1.rollout_pb2 import ClosedGroup, RunTasksRequest, TasksFinished, TaskSpec
from paceline.v1.rollout_pb2_grpc import (
    RolloutServiceServicer,
    add_RolloutServiceServicer_to_server,
)
from paceline.v1.trajectory_pb2 import SpeculationStats


def request(tasks: int) -> RunTasksRequest:
    names = (f"t{index}" for index in range(tasks))
    return RunTasksRequest(samples_per_task=3, tasks=[TaskSpec(task_id=name) for name in names])


@pytest.mark.parametrize(
    ("tasks", "shares"), [(5, [["t0", "t1"], ["t2", "t3"], ["t4"]]), (1, [["t0"]])]
)
def test_neighbouring_tasks_go_to_a_gateway_in_equal_shares(
    tasks: int, shares: list[list[str]]
) -> None:
    parts = split_tasks(request(tasks), 3)
    assert [[task.task_id for task in part.tasks] for part in parts.values()] == shares
    assert [part.samples_per_task for part in parts.values()] == [3] * len(shares)


def test_workers_have_the_numbers_of_their_gateway() -> None:
    assert by_gateway([0, 2, 3, 5], 2) == {0: [0], 1: [0, 1], 2: [1]}


def test_totals_of_all_gateways_are_those_of_one() -> None:
    def part(scored: int, pulls: int, speed: float, group: str) -> TasksFinished:
        arm = ArmStats(arm="off", batch_group=4, pulls=pulls, mean_tokens_per_s=speed)
        return TasksFinished(
            scored=scored,
            rollout_s=float(scored),
            speculation=SpeculationStats(drafted_rounds=scored),
            arms=[arm],
            closed_groups=[ClosedGroup(group_id=group)],
        )

    whole = summed([part(2, 1, 10.0, "a"), part(3, 3, 30.0, "b")])
    assert (whole.scored, whole.rollout_s, whole.speculation.drafted_rounds) == (5, 3.0, 5)
    assert [group.group_id for group in whole.closed_groups] == ["a", "b"]
    (arm,) = whole.arms
    assert (arm.pulls, arm.mean_tokens_per_s) == (4, 25.0)


def test_progress_is_that_of_the_gateway_that_moved_last() -> None:
    idle = [Part(name="gateway", counts={"open_sessions": 1}), Part(name="worker 0")]
    busy = [
        Part(
            name="gateway",
            doing="runs step 3",
            waits_for="worker 0",
            still_s=2.0,
            counts={"open_sessions": 2},
            trouble="slow",
        ),
        Part(name="worker 0", doing="generates"),
    ]
    front, first, second = merge_gateways([idle, busy], 1)
    assert (front.name, front.doing, front.waits_for) == ("gateway", "runs step 3", "worker 1")
    assert (front.counts["open_sessions"], front.trouble) == (3, "gateway-1 slow")
    assert (first.name, second.name, second.doing) == ("worker 0", "worker 1", "generates")


async def test_a_failure_of_one_stream_ends_all() -> None:
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def failing() -> AsyncGenerator[str]:
        await asyncio.sleep(0)
        raise Unavailable("gateway-1 is gone")
        yield ""

    found = list[tuple[int, str]]()

    async def collect() -> None:
        async for item in merged([endless(), failing()]):
            found.append(item)

    with pytest.raises(Unavailable, match="gateway-1"):
        await collect()
    assert found == [(0, "first")]
    assert ended.is_set()


async def test_a_gateway_that_does_not_accept_a_step_is_not_awaited_for_ever() -> None:
    class Silent(RolloutServiceServicer):
        async def RunTasks(self, request: Any, context: Any) -> AsyncGenerator[Any]:
            await asyncio.Event().wait()
            yield

    server = Server("127.0.0.1:0", SecurityConfig())
    server.add(add_RolloutServiceServicer_to_server, Silent(), "paceline.v1.RolloutService")
    address = f"127.0.0.1:{await server.start()}"
    addresses = AddressesConfig(gateway=address)
    config = CoordinatorConfig(tasks_path="tasks", step_deadline_s=0.2)
    peers, unused = Peers(addresses, SecurityConfig()), cast(Any, None)
    try:
        step = TaskCalls(Calls(config, peers, *(unused,) * 5), request(1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(patient(20)) as limit:
                await step.begin()
        assert not limit.expired()
    finally:
        await peers.close()
        await server.stop(0)
