"""Ranks of a trainer on two nodes: two groups of real processes, and a real call between them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from paceline.config import SecurityConfig
from paceline.errors import ConfigError, DeadlineExceeded
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.ranks.group import RankGroup, RankLost, Span
from paceline.ranks.hosting import host_ranks
from paceline.rpc import Server, channel
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.server import rank_group
from paceline.v1.policy_pb2 import KeepRanksRequest
from paceline.v1.policy_pb2_grpc import (
    PolicyServiceServicer,
    PolicyServiceStub,
    add_PolicyServiceServicer_to_server,
)

IMPORTS = os.pathsep.join([str(Path(__file__).parent), *sys.path])
SECURITY = SecurityConfig()
pytestmark = pytest.mark.usefixtures("own_forkserver")


class Trainer(PolicyServiceServicer):
    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def KeepRanks(self, request_iterator: AsyncIterator[KeepRanksRequest], context: Any) -> Any:
        return self.group.hosts.orders(request_iterator, "run")


def group_of(tmp_path: Path, node: int, address: str, module: str = "rank_sum") -> RankGroup:
    span = Span(node, 2, address)
    return RankGroup(module, 4, 1, tmp_path, {"PYTHONPATH": IMPORTS}, span=span)


@asynccontextmanager
async def hosted(group: RankGroup, address: str, node: int = 1) -> AsyncIterator[RankGroup]:
    stop = asyncio.Event()
    async with channel(address, SECURITY) as to_trainer, group:
        dial = partial(PolicyServiceStub(to_trainer).KeepRanks, wait_for_ready=True)
        offer = KeepRanksRequest(run_id="run", node=node)
        task = asyncio.create_task(host_ranks(group, offer, dial, stop))
        yield group
        stop.set()
        await asyncio.wait_for(task, patient(20))


@asynccontextmanager
async def trained(tmp_path: Path, module: str = "rank_sum") -> AsyncIterator[tuple[RankGroup, str]]:
    """The trainer's own ranks, behind a server."""
    address = f"127.0.0.1:{free_port()}"
    group = group_of(tmp_path, 0, address, module)
    server = Server(address, SECURITY)
    server.add(add_PolicyServiceServicer_to_server, Trainer(group), "paceline.v1.PolicyService")
    await server.start()
    try:
        async with group:
            yield group, address
    finally:
        await server.stop(1.0)


async def sums(group: RankGroup) -> list[tuple[int, bytes]]:
    group.send(b"10")
    return sorted([await group.receive(patient(30)) for _ in range(4)])


ALL = [(rank, b"46.0") for rank in range(4)]


@pytest.mark.slow
async def test_a_rank_that_dies_elsewhere_is_named_and_all_start_again(tmp_path: Path) -> None:
    async with (
        trained(tmp_path) as (group, address),
        hosted(group_of(tmp_path, 1, address), address) as there,
    ):
        await group.start(patient(60))
        assert await sums(group) == ALL
        assert (len(group.pids), len(there.pids), there.own) == (2, 2, range(2, 4))
        before = [*group.pids, *there.pids]
        os.kill(there.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"rank 3 .*SIGKILL"):
            await group.receive(patient(60))
        await group.end_ranks(0.0)
        assert there.pids == []
        assert not any(psutil.pid_exists(pid) for pid in before)
        await group.start(patient(60))
        assert await sums(group) == ALL
        await group.end_ranks(2.0)
    assert [one.name for one in os.scandir(tmp_path) if one.name.startswith("ranks-")] == []


async def test_a_node_whose_process_ends_is_awaited_at_the_next_start(tmp_path: Path) -> None:
    async with trained(tmp_path, "rank_echo") as (group, address):
        with pytest.raises(DeadlineExceeded, match="on another node does not call"):
            await group.start(0.5)
        async with hosted(group_of(tmp_path, 1, address, "rank_echo"), address) as there:
            await group.start(patient(30))
            group.send(b"environment")
            answers = dict([await group.receive(patient(30)) for _ in range(4)])
            places = [json.loads(answers[rank]) for rank in range(4)]
            assert [one["LOCAL_RANK"] for one in places] == ["0", "1", "0", "1"]
            assert {one["LOCAL_WORLD_SIZE"] for one in places} == {"2"}
            assert len({one["PACELINE_RANK_STORE"] for one in places}) == 1
            before = there.pids
        assert not any(psutil.pid_exists(pid) for pid in before)
        with pytest.raises(RankLost, match="the process of node 1 is away"):
            await group.receive(patient(30))
        await group.end_ranks(0.0)
        async with hosted(group_of(tmp_path, 1, address, "rank_echo"), address):
            await group.start(patient(30))


async def test_a_node_that_the_trainer_lacks_is_refused(tmp_path: Path) -> None:
    async with trained(tmp_path) as (_, address), channel(address, SECURITY) as to_trainer:
        for wrong in (
            KeepRanksRequest(run_id="run", node=2),
            KeepRanksRequest(run_id="other", node=1),
        ):
            call = PolicyServiceStub(to_trainer).KeepRanks(iter([wrong]))
            with pytest.raises(grpc.aio.AioRpcError, match="this trainer has no ranks there"):
                await call.read()


def test_ranks_on_several_nodes_of_a_shared_network_need_a_word() -> None:
    many = {"run": {"policy_nodes": 2}, "addresses": {"policy_trainer": "10.0.0.1:7402"}}
    config = PolicyTrainerConfig.model_validate({**many, "ranks": 4})
    with pytest.raises(ConfigError, match=r"neither token nor encryption.*allow_insecure"):
        rank_group(config)
    with pytest.raises(ConfigError, match=r"there is no such node.*seen: 2"):
        config.of_node(2)
    allowed = PolicyTrainerConfig.model_validate(
        {**many, "ranks": 4, "security": {"allow_insecure": True}}
    )
    assert rank_group(allowed.of_node(1)).own == range(2, 4)
