"""A server that takes no writes, for each of the three reasons and in every form of its answer."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis.asyncio
from redis_servers import foreign_redis
from watched_stream import WatchedStream

from paceline.errors import InvalidInput, ResourceExhausted
from paceline.local.patience import patient
from paceline.streams import connect, run_key
from paceline.streams.connection import REDIS_FULL, redis_errors
from paceline.streams.open_sessions import OpenSessions, api_key_hash

Fill = Callable[[redis.asyncio.Redis, str], Awaitable[object]]


async def _no_memory(client: redis.asyncio.Redis, url: str) -> None:
    await client.config_set("maxmemory", "1")


async def _replica(client: redis.asyncio.Redis, url: str) -> None:
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")


async def _no_disk(client: redis.asyncio.Redis, url: str) -> None:
    """Its directory is gone, so a snapshot fails; with save points writes are refused then."""
    await client.config_set("save", "3600 1000000")
    shutil.rmtree(Path(url.removeprefix("unix://").partition("?")[0]).parent)
    await client.bgsave()
    async with asyncio.timeout(patient(10)):
        async for persistence in _told(client):
            if persistence["rdb_last_bgsave_status"] != "ok":
                return


async def _told(client: redis.asyncio.Redis) -> AsyncIterator[dict[str, str]]:
    """Yield the server's snapshot state repeatedly; the server announces no failed snapshot."""
    while True:
        yield await client.info("persistence")


FULL: dict[str, tuple[Fill, str]] = {
    "memory": (_no_memory, r"has no memory left: .*; allowed: free memory there"),
    "replica": (
        _replica,
        r"is a replica that takes no writes: .*; allowed: the URL of its primary",
    ),
    "disk": (_no_disk, r"cannot write to its disk: .*; allowed: free space on its disk"),
}


@pytest.fixture
def foreign_url(tmp_path: Path) -> Iterator[str]:
    with foreign_redis(tmp_path / "r") as url:
        yield url


@pytest.fixture
async def client(foreign_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(foreign_url)
    yield client
    await client.aclose()


@pytest.mark.parametrize("why", FULL)
async def test_what_a_full_server_refuses_is_exhausted_and_says_what_to_do(
    client: redis.asyncio.Redis, foreign_url: str, run_id: str, why: str
) -> None:
    stream = WatchedStream(client, run_key(run_id, "s"))
    await stream.create_group("g")
    await stream.append({}, b"x")
    await stream.read("g", "c", 1, 0.0)
    fill, words = FULL[why]
    await fill(client, foreign_url)
    with pytest.raises(ResourceExhausted, match=words) as caught:
        await stream.append({}, b"y")  # within a Lua script
    assert caught.value.reason == REDIS_FULL
    with pytest.raises(ResourceExhausted, match=words), redis_errors(client, "a plain write"):
        await client.set("k", "v")
    for transaction in (False, True):
        pipe = client.pipeline(transaction=transaction).get("k").set("k", "v").get("k")
        with pytest.raises(ResourceExhausted), redis_errors(client, "the midst of a pipeline"):
            await pipe.execute()
    assert [entry.payload for entry in await stream.history()] == [b"x"]
    await stream.close()


async def test_what_was_refused_is_written_when_there_is_memory_again(
    client: redis.asyncio.Redis, foreign_url: str, run_id: str
) -> None:
    stream, sessions = WatchedStream(client, run_key(run_id, "s")), OpenSessions(client, run_id)
    await _no_memory(client, foreign_url)
    sessions.start()
    sessions.opened("s1", {"api_key_hash": api_key_hash("k")})
    with pytest.raises(ResourceExhausted):
        await stream.append({}, b"x")
    assert not await sessions.wait_written(0.1)
    await client.config_set("maxmemory", "0")
    await stream.append({}, b"x")
    assert await sessions.wait_written(patient(10))
    await sessions.stop(1.0)
    await stream.close()


async def test_the_data_of_a_refused_command_does_not_count_as_the_servers_answer(
    client: redis.asyncio.Redis,
) -> None:
    pipe = client.pipeline(transaction=False).set("k", "v").hset("k", "OOM", "MISCONF")
    with pytest.raises(InvalidInput, match="refused"), redis_errors(client, "a wrong type"):
        await pipe.execute()
