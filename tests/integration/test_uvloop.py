"""Services run on uvloop: what they use of processes and sockets works there too."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from paceline.errors import DeadlineExceeded
from paceline.events import FactPublisher, FactSubscriber
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.ranks.group import RankGroup, RankLost
from paceline.v1.coordinator_pb2 import Fact

PLACES = os.pathsep.join([str(Path(__file__).parent), *sys.path])


def _run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(main)


def test_ranks_talk_and_their_death_is_seen(tmp_path: Path) -> None:
    async def main() -> None:
        async with RankGroup("rank_echo", 2, 1, tmp_path, {"PYTHONPATH": PLACES}) as ranks:
            await ranks.start(patient(20.0))
            await ranks.send(b"x")
            assert {await ranks.receive(10.0), await ranks.receive(10.0)} == {(0, b"x"), (1, b"x")}
            os.kill(ranks.pids[0], signal.SIGKILL)
            with pytest.raises(RankLost, match="rank 0"):
                await ranks.receive(10.0)

    _run(main())


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
