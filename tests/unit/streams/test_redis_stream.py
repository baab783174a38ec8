"""Cases specific to Redis: both server generations, lost answers, lost groups, a lost server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis.asyncio
from redis_servers import foreign_redis
from watched_stream import WatchedStream

from paceline.errors import ConfigError, InvalidInput, Unavailable
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.streams import connect, run_key, scripts
from paceline.streams.redis_stream import flat


async def test_a_repeated_call_is_known_as_the_same(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    """The client repeats a script after its answer was lost. The second run must not append and
    must give the same answer.
    """
    name = run_key(run_id, "s")
    script = redis_client.register_script(scripts.script("add", "append"))
    keys = [name, f"{name}:once:k", f"{name}:sizes"]
    first = await script(keys=keys, args=[60_000, 0, 1, *flat({}, b"x")])
    again = await script(keys=keys, args=[60_000, 0, 1, *flat({}, b"x")])
    assert first == again
    assert await redis_client.xlen(name) == 1


async def test_markers_of_appends_expire(redis_client: redis.asyncio.Redis, run_id: str) -> None:
    stream = WatchedStream(redis_client, run_key(run_id, "s"))
    await stream.append({}, b"x")
    pattern = f"{stream.key}:once:*".replace("{", "\\{")
    (lifetime,) = [
        await redis_client.pttl(name) async for name in redis_client.scan_iter(match=pattern)
    ]
    assert 0 < lifetime <= 120_000
    await stream.close()


async def test_a_server_that_came_back_empty_gets_its_group_again(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    stream = WatchedStream(redis_client, run_key(run_id, "s"))
    await stream.create_group("g")
    await redis_client.delete(stream.key)
    await stream.append({"n": "1"}, b"x")
    assert [entry.fields["n"] for entry in await stream.read("g", "c", 1, 1.0)] == ["1"]
    await stream.close()


async def test_what_was_delivered_into_a_lost_connection_is_read_next(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    stream = WatchedStream(redis_client, run_key(run_id, "s"))
    await stream.create_group("g")
    for n in range(4):
        await stream.append({"n": str(n)}, b"x")
    (seen,) = await stream.read("g", "c", 1, 0)
    # Another connection takes two entries as the same consumer, like a read with a lost answer.
    await redis_client.xreadgroup("g", "c", {stream.key: ">"}, count=2)
    stream._doubtful.add(("g", "c"))
    numbers = [entry.fields["n"] for _ in range(3) for entry in await stream.read("g", "c", 1, 0)]
    assert (seen.fields["n"], numbers) == ("0", ["1", "2", "3"])
    await stream.close()


async def test_a_killed_connection_does_not_end_a_blocking_read(
    tmp_path: Path, run_id: str
) -> None:
    with foreign_redis(tmp_path / "r") as url:
        redis_client = connect(url)
        stream = WatchedStream(redis_client, run_key(run_id, "s"))
        await stream.create_group("g")
        reading = asyncio.create_task(stream.read("g", "c", 1, 20.0))
        blocked: list[dict[str, str]] = []
        async with asyncio.timeout(patient(10)):
            while not blocked:
                clients = await redis_client.client_list()
                blocked = [
                    each for each in clients if each["cmd"] == "xreadgroup" and "b" in each["flags"]
                ]
                await asyncio.sleep(0.01)
        assert await redis_client.client_kill_filter(_id=blocked[0]["id"]) == 1
        await stream.append({"n": "1"}, b"x")
        assert [entry.fields["n"] for entry in await reading] == ["1"]
        await stream.close()
        await redis_client.aclose()


async def test_a_server_that_stays_away_is_unavailable_within_the_outage_allowed() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    client = connect(url, outage_s=0.3)
    stream = WatchedStream(client, "s", outage_s=0.3)
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+ does not answer") as caught:
        await stream.append({}, b"x")
    assert "secret" not in str(caught.value)
    with pytest.raises(Unavailable):
        await stream.read("g", "c", 1, 0.1)
    assert time.monotonic() - began < 10
    await stream.close()
    await client.aclose()


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="localhost:1"):
        connect("localhost:1")


def test_a_run_id_cannot_leave_its_keys() -> None:
    assert run_key("a-1", "journal") == "paceline:{a-1}:journal"
    with pytest.raises(InvalidInput):
        run_key("a}:{b", "journal")


async def test_many_pending_entries_are_re_read_page_by_page(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    stream = WatchedStream(redis_client, run_key(run_id, "s"))
    await stream.create_group("g")
    ids = [await stream.append({"n": str(n)}, b"x") for n in range(100)]
    await stream.read("g", "c", 100, 0)
    assert [entry.id for entry in await stream.unacked("g", "c")] == ids
    await stream.close()


async def test_what_the_budget_pushes_out_leaves_no_size_behind(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    """Else the hash of sizes grows with every entry of a run."""
    name = run_key(run_id, "s")
    stream = WatchedStream(redis_client, name, byte_budget=1000)
    for n in range(9):
        await stream.append({"n": str(n)}, bytes(298))
    kept = {entry.id.encode() for entry in await stream.history()}
    assert set(await redis_client.hkeys(f"{name}:sizes")) == kept | {b"total"}
    assert len(kept) == 3
    await stream.close()
