"""A foreign Redis is examined before a run uses it; real servers of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis_servers import foreign_redis

from paceline.config import RedisConfig, RunConfig, ServiceConfig
from paceline.errors import ConfigError
from paceline.local.launch import ChildEvent
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.local.redis import check_durable
from paceline.local.services import service
from paceline.local.supervisor import Supervisor, launch_of

KEPT = ("appendonly yes", "appendfsync always")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (KEPT, ""),
        ((), "it keeps no append-only file (appendonly no): its restart ends the run"),
        (("appendonly yes",), "appendfsync is everysec: a crash of its machine loses"),
        (
            (*KEPT, "user default on nopass ~* +@all -config"),
            "appendfsync cannot be checked: CONFIG is forbidden",
        ),
        (("user default on nopass ~* +@all -info",), "its settings cannot be checked: "),
        (("maxmemory-policy allkeys-lru", *KEPT), ""),  # nothing is evicted without a maxmemory
    ],
)
async def test_what_a_user_should_know_is_said(
    tmp_path: Path, settings: tuple[str, ...], words: str
) -> None:
    with foreign_redis(tmp_path / "r", *settings) as url:
        said = await check_durable(url)
    assert said.startswith(words)
    assert bool(said) == bool(words)


async def test_a_port_without_a_password_is_said(tmp_path: Path) -> None:
    port = free_port()
    with foreign_redis(tmp_path / "r", f"port {port}", "bind 127.0.0.1", *KEPT):
        said = await check_durable(f"redis://127.0.0.1:{port}/0")
    assert said == "it asks for no password: who reaches it may read and change the run"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("maxmemory 100mb", "maxmemory-policy allkeys-lru"), r"throws keys away.*allkeys-lru"),
        (("replicaof 127.0.0.1 1",), "is a replica; allowed: the URL of its primary"),
    ],
)
async def test_a_server_that_cannot_keep_a_run_is_refused(
    tmp_path: Path, settings: tuple[str, ...], words: str
) -> None:
    with foreign_redis(tmp_path / "r", *settings) as url:
        with pytest.raises(ConfigError, match=words):
            await check_durable(url)
        config = ServiceConfig(run=RunConfig(dir=str(tmp_path)), redis=RedisConfig(durable_url=url))
        with pytest.raises(ConfigError, match=words):
            await Supervisor([launch_of(service("redis"), config, [])], tmp_path).start(
                patient(20.0)
            )


async def test_the_console_hears_of_it_when_the_run_starts(tmp_path: Path) -> None:
    events: list[ChildEvent] = []
    with foreign_redis(tmp_path / "r") as url:
        config = ServiceConfig(run=RunConfig(dir=str(tmp_path)), redis=RedisConfig(durable_url=url))
        launches = [launch_of(service("redis"), config, [])]
        async with Supervisor(launches, tmp_path, on_event=events.append) as supervisor:
            await supervisor.start(patient(20.0))
    assert [event.kind for event in events] == ["healthy"]
    assert events[0].detail.startswith("it keeps no append-only file")
