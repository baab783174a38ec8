"""Steps of the coordinator over two real gateways, with groups that agents opened at either
gateway.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from integration.gateway.conftest import Served
from integration.gateway.test_open_traffic import finished, redis_keys, step_request
from integration.gateway.test_several_gateways import Pair, group_of, pair

from paceline.errors import StaleEpoch
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.services.coordinator.calls.base import Calls
from paceline.services.coordinator.calls.gateways import TaskCalls
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.v1 import rollout_pb2 as rpb

__all__ = ["pair"]


def calls_to(both: tuple[Served, Served]) -> Calls:
    """The coordinator's calls to two gateways with one worker each."""
    unused = cast(Any, None)
    stubs, channels = (tuple(getattr(one, name) for one in both) for name in ("stub", "channel"))
    peers = cast(Any, SimpleNamespace(rollouts=stubs, gateways=channels))
    state = cast(Any, SimpleNamespace(settings=SimpleNamespace(workers=2)))
    config = CoordinatorConfig(tasks_path="tasks")
    return Calls(config, peers, unused, unused, unused, lambda: 0.0, lambda: state)


async def news_of(step: TaskCalls) -> list[tuple[str, Any]]:
    return [one async for one in step.news()]


def groups_of(news: list[tuple[str, Any]]) -> set[str]:
    name, last = news[-1]
    assert name == "finished"
    return {group.group_id for group in last.closed_groups}


async def test_steps_get_their_groups_from_all_gateways_the_earliest_step_first(
    pair: Pair, redis_url: str, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id) | {"engine": {"workers": 1}}
    async with pair(**keys) as both, asyncio.timeout(patient(60)):
        calls = calls_to(both)
        running = {}
        for epoch, (number, groups) in enumerate(((5, 1), (4, 2)), 1):
            request = step_request(both[0], number, groups)
            request.context.epoch = epoch
            step = TaskCalls(calls, request)
            await step.begin()
            running[number] = asyncio.create_task(news_of(step))
        names = group_of(1, "a"), group_of(0, "a"), group_of(1, "b")
        for name, served in zip(names[:2], (both[1], both[0]), strict=True):
            await finished(served, name, 1, [1.0])
        assert groups_of(await running[4]) == {*names[:2]}
        assert not running[5].done()
        await finished(both[1], names[2], 1, [1.0])
        news = await running[5]
        assert groups_of(news) == {names[2]}
        assert {answer.worker_index for name, answer in news if name == "sample"} == {1}
        request = step_request(both[0], 4, 2)
        request.context.epoch = 3
        again = TaskCalls(calls, request)
        await again.begin()
        assert groups_of(await news_of(again)) == {*names[:2]}, "a repeated call has the same"
        order = rpb.AssignGroupsRequest(context=step_request(both[0], 4).context, last=True)
        with pytest.raises(StaleEpoch), rpc_errors():
            await both[0].stub.AssignGroups(order, timeout=patient(5))
