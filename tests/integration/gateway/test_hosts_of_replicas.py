"""Several replicas whose engine workers are on two hosts, one of which has workers of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.commands import commit, push, workers
from integration.gateway.conftest import Served, ServeGateway
from integration.gateway.test_partial_rollouts import finished
from integration.gateway.test_staff import shares
from integration.gateway.test_worker_hosts import Hosts, ended

from paceline.errors import InvalidInput
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.place import places
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import workers_pb2
from paceline.v1.workers_pb2_grpc import WorkerHostServiceStub

SPREAD: dict[str, Any] = {
    "engine": {"workers": 0, "hosts": (1, 3), "shared_spool": False},
    "replicas": 2,
}
"""The first replica has a worker here and one there, the second two there."""


@pytest.fixture
def hosts(serve_gateway: ServeGateway, model_dir: Path) -> Hosts:
    return Hosts(serve_gateway, model_dir)


@asynccontextmanager
async def spread(hosts: Hosts, **keys: Any) -> AsyncIterator[tuple[Any, Served]]:
    async with hosts.host(**SPREAD, **keys) as other, hosts.gateway(**SPREAD, **keys) as served:
        yield other, served


async def until_ready(served: Served) -> list[Any]:
    async with asyncio.timeout(patient(60)):
        while True:
            found = list(await workers(served))
            if all(one.ready for one in found):
                return found


async def test_workers_of_both_replicas_on_both_hosts_share_tasks_and_serve_what_is_pushed(
    hosts: Hosts,
) -> None:
    async with spread(hosts) as (other, served):
        assert [one.host for one in await workers(served)] == [0, 1, 1, 1]
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        assert [one.health.versions.policy for one in await workers(served)] == [1, 1, 1, 1]
        news = await finished(served, served.tasks_request(samples_per_task=4))
        assert shares(news) == {0: 2, 1: 2, 2: 2, 3: 2}
        said = await ended(other)
    assert said.count("version_copied") == 1, "for three workers"


async def test_a_host_that_dies_costs_both_replicas_its_workers_until_it_is_back(
    hosts: Hosts,
) -> None:
    async with spread(hosts) as (other, served):
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        other.kill()
        await other.wait()
        async with asyncio.timeout(patient(60)):
            while [one.ready for one in await workers(served)] != [True, False, False, False]:
                pass
        async with hosts.host(**SPREAD):
            found = await until_ready(served)
            assert [one.health.versions.policy for one in found] == [1, 1, 1, 1]
            news = await finished(served, served.tasks_request(samples_per_task=4))
            assert shares(news) == {0: 2, 1: 2, 2: 2, 3: 2}


async def test_a_replica_that_dies_has_its_workers_there_again(hosts: Hosts) -> None:
    async with spread(hosts) as (other, served):
        assert served.fleet is not None
        second = served.fleet.replicas[1]
        before = [one.pid for one in await workers(served)]
        served.fleet.replace(second)
        await asyncio.wait_for(second.up.wait(), patient(60))
        found = await until_ready(served)
        assert [one.pid == pid for one, pid in zip(found, before, strict=True)] == [
            *[True, True],
            *[False, False],
        ]
        assert other.returncode is None


async def test_only_replicas_that_there_are_can_be_found(hosts: Hosts) -> None:
    async with spread(hosts) as (_, served):
        stub: Any = WorkerHostServiceStub(served.channel)
        assert served.fleet is not None
        for number, replica in enumerate(served.fleet.replicas):
            asked = workers_pb2.FindReplicaRequest(replica=number)
            port = (await stub.FindReplica(asked, timeout=patient(5))).port
            assert replica.place.hosts_address == f"127.0.0.1:{port}"
        asked = workers_pb2.FindReplicaRequest(replica=2)
        said = "no such replica; seen: 2; allowed: 0 to 1"
        with pytest.raises(InvalidInput, match=said), rpc_errors():
            await stub.FindReplica(asked, timeout=patient(5))


def test_ports_that_are_named_are_those_of_the_replicas(hosts: Hosts, tmp_path: Path) -> None:
    config = GatewayConfig.model_validate(hosts.settings(**SPREAD, replica_port=7500))
    found = places(config, tmp_path, tmp_path)
    assert [one.hosts_address for one in found] == ["127.0.0.1:7500", "127.0.0.1:7501"]
    assert [one.hosts for one in found] == [(1, 1), (0, 2)]
