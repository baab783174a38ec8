"""Services run on uvloop: their use of processes and sockets works there too."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline.config import SecurityConfig
from paceline.errors import DeadlineExceeded
from paceline.events import FactPublisher, FactSubscriber
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.ranks.group import RankGroup, RankLost
from paceline.rpc import channel
from paceline.rpc.server import Server
from paceline.v1.coordinator_pb2 import Fact

pytestmark = pytest.mark.slow

TESTS = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
PLACES = os.pathsep.join([str(Path(__file__).parent), *sys.path])


def _run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(main)


def test_ranks_talk_and_their_death_is_seen(tmp_path: Path) -> None:
    async def main() -> None:
        async with RankGroup("rank_echo", 2, 1, tmp_path, {"PYTHONPATH": PLACES}) as ranks:
            await ranks.start(patient(20.0))
            ranks.send(b"x")
            assert {await ranks.receive(10.0), await ranks.receive(10.0)} == {(0, b"x"), (1, b"x")}
            os.kill(ranks.pids[0], signal.SIGKILL)
            with pytest.raises(RankLost, match="rank 0"):
                await ranks.receive(10.0)

    _run(main())


STARTS = 200


async def starts_beside_calls() -> None:
    """Starts processes while threads of gRPC are busy; prints the counts of their exit statuses."""
    server = Server("127.0.0.1:0", SecurityConfig())
    port = await server.start()

    async def call() -> None:
        while True:
            async with channel(f"127.0.0.1:{port}", SecurityConfig()) as peer:
                for _ in range(20):
                    await HealthStub(peer).Check(HealthCheckRequest())

    calls = [asyncio.create_task(call()) for _ in range(4)]
    ends = Counter[int]()
    for _ in range(STARTS):
        process = await asyncio.create_subprocess_exec("true")
        ends[await process.wait()] += 1
    for each in calls:
        each.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await server.stop(0)
    sys.stdout.write(f"{dict(ends)}\n")


def test_processes_start_while_grpc_is_busy() -> None:
    main = f"import uvloop; from {__name__} import *; uvloop.run(starts_beside_calls())"
    found = subprocess.run(
        [sys.executable, "-c", main],
        env={**os.environ, "PYTHONPATH": TESTS},
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(60),
    )
    assert found.stdout == f"{{0: {STARTS}}}\n", found.stderr


def test_facts_arrive() -> None:
    async def ignore(first: int, last: int) -> None:
        return None

    async def main() -> None:
        address = f"tcp://127.0.0.1:{free_port()}"

        with (
            FactSubscriber(address, "r", ignore) as subscriber,
            FactPublisher(address, "r") as publisher,
        ):
            for _ in range(200):
                await publisher.publish(Fact())
                try:
                    assert (await subscriber.next(0.05)).sequence >= 1
                    return
                except DeadlineExceeded:
                    continue
            pytest.fail("no fact arrived")

    _run(main())
