"""The drafter trainer as it runs: parent, rank, Redis, a weight receiver; activated, preempted, killed, resumed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from integration.drafter_world import Receiver, World, rows_of_policy, serve_receiver

from paceline.local.ports import free_port
from paceline.streams import FeatureBatch, connect
from paceline.v1 import drafter_pb2 as pb
from paceline.weights import Spool


@pytest.fixture(scope="module")
def rows() -> list[FeatureBatch]:
    return rows_of_policy("any", 40)


@pytest.fixture
async def world(tmp_path: Path, redis_url: str, run_id: str) -> AsyncIterator[World]:
    spool, receiver, client = Spool(tmp_path / "gateway", keep=4), Receiver(), connect(redis_url)
    server, port = await serve_receiver(spool, receiver)
    address = f"127.0.0.1:{free_port()}"
    made = World(run_id, tmp_path / "run", redis_url, client, address, spool, receiver, f"127.0.0.1:{port}")
    yield made
    await made.stop(9)
    await server.stop(0)
    await client.aclose()


async def collect(news: AsyncIterator[pb.ActivateResponse]) -> list[pb.ActivateResponse]:
    return [response async for response in news]


async def test_an_activation_trains_on_captured_rows_and_ends_with_detached(
    world: World, rows: list[FeatureBatch]
) -> None:
    await world.append(rows)
    await world.start()
    news = await collect(world.activate(1, max_steps=6))
    assert [one.WhichOneof("event") for one in news] == ["activated", "detached"]
    detached = news[-1].detached
    assert detached.reason == "max_steps"
    assert detached.steps == 6
    assert detached.micro_batches == 24
    assert (await world.stream.depth()).entries == 0
