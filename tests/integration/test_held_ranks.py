"""Ranks of other hosts in the hands of their service: real processes and a real server, no torch."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from integration.test_ranks import IMPORTS

from paceline.config import SecurityConfig
from paceline.errors import ConfigError, FailedPrecondition, InvalidInput
from paceline.local.patience import patient
from paceline.ranks.group import HostShare, RankGroup, RankLost
from paceline.ranks.hosting import RankHost
from paceline.ranks.hosts import RankHosts
from paceline.ranks.spread import RanksOfHost, SpreadRanks
from paceline.rpc import Server
from paceline.v1.ranks_pb2_grpc import add_RankHostServiceServicer_to_server

SAME = {"lr in the settings": "1"}


def part(folder: Path) -> RankGroup:
    return RankGroup("rank_echo", 0, 1, folder, {"PYTHONPATH": IMPORTS})


class Service:
    """A trainer's side: one rank of its own, one on a host, until it is resized."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = RankHosts(1, "echo", SAME)
        self.parts: list[RanksOfHost] = [part(folder), *self.hosts.ranks]
        self.ranks = SpreadRanks(self.parts, folder / "meeting")
        self.resize(1, 1)
        self.address = ""

    def resize(self, *sizes: int) -> None:
        """So many on each host."""
        for host, (one, size) in enumerate(zip(self.parts, sizes, strict=True)):
            one.resize(HostShare(sum(sizes[:host]), size, sum(sizes), "cpu"))

    async def hold(self, host: int = 1, same: Mapping[str, str] = SAME) -> None:
        """Joins as a host does; ends when the service is gone."""
        held = RankHost(part(self.folder), host, same)
        try:
            await held.hold(self.address, SecurityConfig(), patient(10))
        finally:
            await held.close()

    async def echoed(self, message: bytes) -> dict[int, bytes]:
        await self.ranks.send(message)
        return dict([await self.ranks.receive(patient(10)) for _ in self.ranks.pids])


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(tmp_path)
    server = Server("127.0.1.1:0", SecurityConfig())
    server.add(add_RankHostServiceServicer_to_server, made.hosts, "paceline.v1.RankHostService")
    made.address = f"127.0.1.1:{await server.start()}"
    yield made
    await made.ranks.stop(0.0)
    await server.stop(0)


@asynccontextmanager
async def holding(service: Service) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(service.hold())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_ranks_of_two_hosts_are_one_group(service: Service) -> None:
    async with holding(service):
        for _ in range(2):
            await service.ranks.start(patient(30))
            assert await service.echoed(b"x" * 2_000_000) == dict.fromkeys((0, 1), b"x" * 2_000_000)
            assert len({*service.ranks.pids}) == 2
            assert service.ranks.pids_here == service.ranks.pids[:1]
            await service.ranks.end_ranks(1.0)
            assert service.ranks.pids == []


async def test_what_becomes_of_a_host_becomes_of_all_until_another_one_has_joined(
    service: Service,
) -> None:
    async with holding(service) as first:
        await service.ranks.start(patient(30))
        with pytest.raises(FailedPrecondition, match="a host of this number holds ranks already"):
            await service.hold()
        first.cancel()
        with pytest.raises(RankLost, match="host 1 of echo is gone with its ranks"):
            await service.ranks.receive(patient(10))
        with pytest.raises(RankLost):
            await service.ranks.send(b"nobody is there")
        await service.ranks.end_ranks(0.0)
    starting = asyncio.create_task(service.ranks.start(patient(30)))
    async with holding(service):
        await starting
        assert await service.echoed(b"again") == {0: b"again", 1: b"again"}


async def test_a_start_is_of_as_many_ranks_as_each_host_was_given_before_it(
    service: Service,
) -> None:
    async with holding(service):
        for sizes in ((1, 1), (1, 2), (2, 0), (1, 1)):
            service.resize(*sizes)
            await service.ranks.start(patient(30))
            ranks = dict.fromkeys(range(sum(sizes)), b"x")
            assert await service.echoed(b"x") == ranks
            assert [one.size for one in service.parts] == [len(one.pids) for one in service.parts]
            assert len(service.ranks.pids_here) == sizes[0]
            told = await service.echoed(b"environment")
            seen = [json.loads(told[rank]) for rank in ranks]
            assert [one["RANK"] for one in seen] == [str(rank) for rank in ranks]
            assert [one["LOCAL_RANK"] for one in seen] == [
                str(rank) for size in sizes for rank in range(size)
            ]
            assert {one["WORLD_SIZE"] for one in seen} == {str(sum(sizes))}
            assert {one["PACELINE_RANK_DEVICE"] for one in seen} == {"cpu"}
            with pytest.raises(FailedPrecondition, match=r"while they run; seen: \d run"):
                service.resize(2, 2)
            await service.ranks.end_ranks(1.0)


async def test_a_host_without_ranks_may_come_and_go(service: Service) -> None:
    service.resize(2, 0)
    await service.ranks.start(patient(30))
    async with holding(service):
        assert await service.echoed(b"joined") == dict.fromkeys((0, 1), b"joined")
    assert await service.echoed(b"gone") == dict.fromkeys((0, 1), b"gone")


async def test_a_rank_that_dies_on_another_host_is_told_with_its_log(service: Service) -> None:
    async with holding(service):
        await service.ranks.start(patient(30))
        os.kill(service.ranks.pids[1], 9)
        with pytest.raises(RankLost, match="host 1: rank 1 of rank_echo was killed by SIGKILL"):
            await service.ranks.receive(patient(10))


async def test_ranks_here_end_where_those_of_the_host_do_not_start(service: Service) -> None:
    with pytest.raises(Exception, match="host 1 of echo has not joined"):
        await service.ranks.start(1.0)
    assert service.ranks.pids == []
    async with holding(service):
        await service.ranks.start(patient(30))
        assert len(service.ranks.pids) == 2


async def test_a_host_that_is_not_expected_or_differs_is_refused_by_name(service: Service) -> None:
    with pytest.raises(InvalidInput, match="host 2; allowed: 1 to 1"):
        await service.hold(2)
    with pytest.raises(ConfigError, match="seen: lr in the settings"):
        await service.hold(1, {"lr in the settings": "2"})
