"""Waits between services, followed and put into words."""

from __future__ import annotations

import asyncio
import time

import pytest

from paceline.config import SecurityConfig
from paceline.errors import DeadlineExceeded
from paceline.local.patience import patient
from paceline.rpc import Server, channel
from paceline.rpc.progress import (
    ASK_S,
    Activity,
    add_progress,
    chain_text,
    wait_chain,
    while_moving,
)
from paceline.v1.progress_pb2 import GetProgressResponse, Part


def test_a_chain_ends_with_who_waits_for_nobody() -> None:
    parts = [
        Part(name="worker 0", doing="decodes", doing_s=3),
        Part(name="coordinator", doing="rollout of step 3", doing_s=40, waits_for="gateway"),
        Part(name="worker 1", doing="decodes", doing_s=31, trouble="stopped: process 7"),
        Part(name="gateway", doing="runs the tasks of step 3", doing_s=40, waits_for="worker 1"),
    ]
    parts[3].last_span, parts[3].last_span_s = "rollout.sample", 31
    chain = wait_chain(parts, "coordinator")
    assert [part.name for part in chain] == ["coordinator", "gateway", "worker 1"]
    assert chain_text(chain) == (
        "coordinator waits for gateway (rollout of step 3, 40 s); gateway waits for worker 1 (runs "
        "the tasks of step 3, 40 s); worker 1 (stopped: process 7, decodes, 31 s); last span of "
        "gateway: rollout.sample, 31 s ago"
    )


def test_a_circle_is_followed_once_and_a_stranger_named() -> None:
    circle = [Part(name="a", waits_for="b"), Part(name="b", waits_for="a")]
    assert [part.name for part in wait_chain(circle, "a")] == ["a", "b"]
    assert [part.name for part in wait_chain([Part(name="a", waits_for="agents")], "a")] == [
        "a",
        "agents",
    ]


def test_a_new_task_is_progress_and_its_time_begins_anew() -> None:
    activity = Activity("gateway", began_s=0.0, moved_s=0.0)
    assert activity.part({"offers": 3}).still_s > 0.0
    activity.begins("runs", "worker 0")
    part = activity.part()
    assert (part.name, part.doing, part.waits_for) == ("gateway", "runs", "worker 0")
    assert part.doing_s == part.still_s < 60.0


@pytest.mark.slow
async def test_a_call_is_awaited_while_its_service_gets_on_and_ends_when_it_stands_still() -> None:
    activity, still_s = Activity("gateway"), patient(1.0)
    activity.begins("commits weights")

    async def answer() -> GetProgressResponse:
        return GetProgressResponse(parts=[activity.part()])

    async def work() -> None:
        for _ in range(30):
            await asyncio.sleep(still_s / 10)
            activity.moves()

    server = Server("127.0.0.1:0", SecurityConfig())
    add_progress(server, answer)
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", SecurityConfig()) as peer:
        async with while_moving(peer, still_s):
            await work()
        began_s, never = time.monotonic(), asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlineExceeded, match="no progress"):
            async with while_moving(peer, still_s):
                await never
        assert never.cancelled()
        assert time.monotonic() - began_s < 10 * still_s
        await server.stop(0)
        with pytest.raises(DeadlineExceeded, match="no progress"):
            async with while_moving(peer, still_s):
                await asyncio.get_running_loop().create_future()


@pytest.mark.slow
async def test_a_service_that_answers_late_is_not_one_that_stands_still() -> None:
    ended = asyncio.Event()

    async def answer() -> GetProgressResponse:
        await asyncio.sleep(2 * ASK_S)
        ended.set()
        return GetProgressResponse(parts=[Part(name="gateway", still_s=0.0)])

    server = Server("127.0.0.1:0", SecurityConfig())
    add_progress(server, answer)
    port = await server.start()
    try:
        peer = channel(f"127.0.0.1:{port}", SecurityConfig())
        async with peer, while_moving(peer, 0.5):
            await ended.wait()
    finally:
        await server.stop(0)


def test_work_that_goes_on_is_the_progress_of_its_service() -> None:
    reception = Activity("weights", began_s=0.0, moved_s=0.0)
    part = Part(name="gateway", still_s=40.0)
    reception.show_on(part)
    assert (part.doing, part.still_s) == ("", 40.0), "it does nothing"
    reception.begins("receives weights")
    reception.show_on(part)
    assert part.doing == "receives weights"
    assert part.still_s < 10.0
