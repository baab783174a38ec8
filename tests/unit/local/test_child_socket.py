"""A worker's socket gives out every message once, in order, without holding the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq

from paceline.local.child import ChildSocket
from paceline.local.patience import patient

DEADLINE_S = patient(20)
WORKER_DEADLINE_MS = int(1e3 * DEADLINE_S)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def connected(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    worker: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    worker.setsockopt(zmq.RCVTIMEO, WORKER_DEADLINE_MS)
    worker.connect(address)
    return worker


async def test_messages_come_in_order_and_others_have_their_turn_between_two(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    told: list[bytes] = []
    turns: list[int] = []
    last = asyncio.Event()

    def take(message: bytes) -> None:
        told.append(message)
        asyncio.get_running_loop().call_soon(lambda: turns.append(len(told)))
        if message == b"99":
            last.set()

    socket = ChildSocket(context, f"ipc://{tmp_path}/worker", take)
    worker = connected(context, f"ipc://{tmp_path}/worker")
    for number in range(100):
        worker.send(b"%d" % number)
    async with asyncio.timeout(DEADLINE_S):
        await last.wait()
    assert told == [b"%d" % number for number in range(100)]
    assert max(after - before for before, after in pairwise(turns)) <= 2
    socket.close()


async def test_an_answer_that_comes_while_another_command_is_sent_is_heard(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    socket = ChildSocket(context, f"ipc://{tmp_path}/worker", answers.put_nowait)
    worker = connected(context, f"ipc://{tmp_path}/worker")
    worker.send(b"ready")
    async with asyncio.timeout(DEADLINE_S):
        assert await answers.get() == b"ready"
        for number in range(50):
            socket.send(b"%d" % number)
            worker.send(worker.recv())
            socket.send(b"more")
            worker.recv()
            assert await answers.get() == b"%d" % number
    socket.close()


async def test_a_worker_that_is_gone_gets_nothing_and_nobody_waits_for_it(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    told: list[bytes] = []
    socket = ChildSocket(context, f"ipc://{tmp_path}/worker", told.append)
    socket.send(b"to nobody")
    socket.close()
    socket.close()
    socket.read()
    assert (told, socket.received) == ([], 0)
