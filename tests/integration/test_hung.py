"""A hanging service or Redis of the run is killed and restarted; a hanging foreign server is
reported as away.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from integration.supervised import QUICK, Events, stub_launch
from redis.asyncio import Redis
from redis_servers import foreign_redis

from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import Unavailable
from paceline.local.launch import Launch
from paceline.local.news import LAST, Turns
from paceline.local.patience import VARIABLE, patient
from paceline.local.redis import resolved, wait_redis
from paceline.local.services import service
from paceline.local.supervisor import Supervisor, launch_of
from paceline.streams import connect

pytestmark = pytest.mark.slow

HUNG_S = 3.0
"""A busy machine may stall a service for two seconds."""


@pytest.mark.slow
async def test_a_service_whose_loop_stands_is_replaced_though_its_process_runs(
    tmp_path: Path,
) -> None:
    events, words = Events(), ("--turns", str(HUNG_S))
    launches = [stub_launch("one", *words), stub_launch("two", *words)]
    async with Supervisor(
        launches, tmp_path, on_event=events.hear, policy=QUICK, hung_s=HUNG_S
    ) as supervisor:
        await supervisor.start(patient(30.0))
        before = supervisor.pids
        began = time.monotonic()
        os.kill(before["one"], signal.SIGUSR2)
        await events.until(lambda heard: "died" in heard.kinds("one"))
        assert time.monotonic() - began >= HUNG_S * 5 / 6
        (died,) = [event for event in events if event.kind == "died"]
        wanted = f"was killed by SIGKILL, hung: no progress for {HUNG_S:g} s; log "
        assert died.detail.startswith(wanted)
        await events.until(lambda heard: heard.kinds("one").count("healthy") == 2)
        assert (supervisor.pids["two"], "died" in events.kinds("two")) == (before["two"], False)


async def test_a_loop_that_turns_or_has_ended_is_left_alone() -> None:
    limit_s = 0.05
    turning, ended = Turns(limit_s), Turns(limit_s)
    ends = [asyncio.create_task(one.end()) for one in (turning, ended)]
    turning.note("")
    ended.note(LAST)
    for _ in range(20):
        await asyncio.sleep(limit_s / 3)
        turning.note("")
    assert not any(end.done() for end in ends)
    time.sleep(4 * patient(limit_s))  # noqa: ASYNC251  the supervisor itself is blocked
    turning.note("")
    await asyncio.sleep(limit_s / 3)
    assert not ends[0].done()
    assert await asyncio.wait_for(ends[0], patient(20)) == ", hung: no progress for 0.05 s"
    assert not ends[1].done()
    ends[1].cancel()


@pytest.fixture
async def redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[float, float]
) -> AsyncIterator[tuple[Supervisor, Events, Redis]]:
    """A Redis of the run's own, under `limits`: heartbeat_s and hung_s."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    words = [f"run.dir={tmp_path}"]
    config = resolved(load_config(ServiceConfig, "local", [], words))
    launch = launch_of(
        service("redis"), config.model_copy(update={"redis": ServiceConfig().redis}), words
    )
    events, (heartbeat_s, hung_s) = Events(), limits
    async with (
        Supervisor(
            [launch],
            tmp_path,
            on_event=events.hear,
            policy=QUICK,
            heartbeat_s=heartbeat_s,
            hung_s=hung_s,
        ) as supervisor,
        connect(config.redis.durable_url) as client,
    ):
        await supervisor.start(patient(30.0))
        yield supervisor, events, client


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(0.6, 4.0)])
@pytest.mark.parametrize("how", ["stopped", "hung"])
async def test_a_redis_of_ours_that_answers_nothing_is_replaced_with_its_data(
    redis: tuple[Supervisor, Events, Redis], how: str
) -> None:
    supervisor, events, client = redis
    await client.set("kept", "1")
    if how == "stopped":
        os.kill(supervisor.pids["redis"], signal.SIGSTOP)
    else:
        endless = asyncio.create_task(client.eval("while true do end", 0))
    await events.until(lambda heard: "died" in heard.kinds("redis"))
    if how == "hung":
        endless.cancel()
    (died,) = [event for event in events if event.kind == "died"]
    said = {"stopped": ", stopped for 0.6 s", "hung": ", hung: no progress for 4 s"}
    assert died.detail.startswith(f"was killed by SIGKILL{said[how]}"), died
    await events.until(lambda heard: heard.kinds("redis").count("healthy") == 2)
    assert await client.get("kept") == b"1"


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(1.5, 30.0)])
async def test_a_redis_of_ours_that_was_stopped_for_less_than_the_limit_lives(
    redis: tuple[Supervisor, Events, Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, events, client = redis
    monkeypatch.setenv(VARIABLE, "1")  # as on a quiet machine
    pid = supervisor.pids["redis"]
    for _ in range(4):  # at several phases of the pings
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.4)
        os.kill(pid, signal.SIGCONT)
        await client.ping()
    assert (supervisor.pids["redis"], "died" in events.kinds("redis")) == (pid, False)


async def test_a_server_that_never_answers_after_its_start_is_replaced(tmp_path: Path) -> None:
    events = Events()

    async def healthy(_: float) -> None: ...

    async def ping(_: float) -> None:
        raise Unavailable("no answer")

    launch = Launch("one", ("sleep", "600"), healthy, ping=ping)
    async with Supervisor(
        [launch], tmp_path, on_event=events.hear, policy=QUICK, heartbeat_s=0.6, hung_s=0.6
    ) as supervisor:
        await supervisor.start(patient(30.0))
        await events.until(lambda heard: "restarted" in heard.kinds("one"))
    died = next(event for event in events if event.kind == "died")
    assert died.detail.startswith("was killed by SIGKILL, hung: no progress for 0.6 s")


async def test_a_server_is_not_asked_whether_it_hangs_before_it_was_healthy(
    tmp_path: Path,
) -> None:
    events, order, asked = Events(), list[str](), asyncio.Event()

    async def healthy(_: float) -> None:
        await asyncio.sleep(0.2)  # like an import: longer than an answer may take
        order.append("healthy")

    async def ping(_: float) -> None:
        order.append("ping")
        asked.set()

    launch = Launch("one", ("sleep", "600"), healthy, ping=ping)
    async with Supervisor(
        [launch], tmp_path, on_event=events.hear, heartbeat_s=0.1, hung_s=0.1
    ) as supervisor:
        await supervisor.start(patient(30.0))
        await asyncio.wait_for(asked.wait(), patient(10))
        assert order[0] == "healthy"
        assert events.kinds("one")[:2] == ["started", "healthy"]


@pytest.mark.slow
async def test_a_redis_that_others_run_is_said_to_be_away_and_back_and_lives(
    tmp_path: Path,
) -> None:
    events = Events()
    with foreign_redis(tmp_path / "r") as url:

        async def ping(deadline_s: float) -> None:
            await wait_redis(url, deadline_s)

        async with Supervisor(
            [Launch("redis", (), ping, ping=ping), stub_launch("one", needs=("redis",))],
            tmp_path,
            on_event=events.hear,
            heartbeat_s=0.4,
            hung_s=1.0,
        ) as supervisor:
            await supervisor.start(patient(30.0))
            (server,) = [
                one
                for one in psutil.Process().children()
                if str(tmp_path / "r") in " ".join([*one.cmdline(), one.cwd()])
            ]
            server.suspend()
            await events.until(lambda heard: "impaired" in heard.kinds("redis"))
            await asyncio.sleep(patient(1.5))
            server.resume()
            await events.until(lambda heard: "recovered" in heard.kinds("redis"))
            # A busy machine may also prevent answers at other times.
            told = events.kinds("redis")
            assert told == ["healthy", *["impaired", "recovered"] * (len(told) // 2)]
            assert server.is_running()
