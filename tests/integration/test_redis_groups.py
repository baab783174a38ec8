"""A cluster, and a master that Sentinel watches, as the Redis of a run: real servers of both."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis.asyncio
from demo_runs import SMALL, demo, left_over
from redis_groups import NAME, Cluster, Watched, cluster, watched
from redis_servers import foreign_redis

from paceline.config import RedisConfig, RunConfig, ServiceConfig
from paceline.errors import ConfigError, InvalidInput, Unavailable
from paceline.local.foreign_redis import check_durable
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.local.redis import wait_redis
from paceline.local.services import service
from paceline.local.supervisor import Supervisor, launch_of
from paceline.streams import OpenSessions, RedisStream, connect, run_key
from paceline.streams.connection import redis_errors

NO_PASSWORD = "it asks for no password: who reaches it may read and change the run"
EVERY = [f"run-{n}" for n in range(12)]


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("watched")) as made:
        yield made


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One whose servers a test may kill or set otherwise."""
    with cluster(tmp_path / "cluster") as made:
        yield made


async def test_runs_spread_over_the_masters_and_each_is_whole_on_one(own_cluster: Cluster) -> None:
    client = connect(own_cluster.url)
    for run_id in EVERY:
        stream, sessions = RedisStream(client, run_key(run_id, "s")), OpenSessions(client, run_id)
        await stream.create_group("g")
        await stream.append({"n": "1"}, b"x", key="once")
        await stream.append_all([({"n": "2"}, b"y"), ({"n": "3"}, b"z")])
        sessions.start()
        sessions.opened("s0", {})
        await sessions.stop(patient(10))
        assert [one.fields["n"] for one in await stream.read("g", "c", 9, 5.0)] == ["1", "2", "3"]
        await stream.close()
    await client.aclose()
    of_run = {
        run_id: {node.port for node in own_cluster.masters if node.ask("KEYS", f"*{{{run_id}}}*")}
        for run_id in EVERY
    }
    assert {len(ports) for ports in of_run.values()} == {1}
    assert set.union(*of_run.values()) == {node.port for node in own_cluster.masters}


@pytest.mark.parametrize("transaction", [False, True])
async def test_scripts_that_a_master_has_forgotten_are_loaded_again(
    own_cluster: Cluster, run_id: str, transaction: bool
) -> None:
    client = connect(own_cluster.url)
    key = run_key(run_id, "n")
    add = client.register_script("return redis.call('INCRBY', KEYS[1], ARGV[1])")
    assert await add(keys=[key], args=[1]) == 1
    for node in own_cluster.masters:
        node.ask("SCRIPT", "FLUSH")
    assert await add(keys=[key], args=[10]) == 11
    pipe = client.pipeline(transaction=transaction)
    await add(keys=[key], args=[100], client=pipe)
    owner = own_cluster.owner(key)

    async def forget() -> None:
        owner.ask("SCRIPT", "FLUSH")

    pipe.load_scripts = forget  # it was there when it was looked for, and is gone now
    assert await pipe.execute() == [111]
    await client.aclose()


async def test_a_command_that_names_no_run_is_refused(redis_cluster: Cluster) -> None:
    client = connect(redis_cluster.url)
    with pytest.raises(InvalidInput, match=r"has to name a key of a run; seen: PING"):
        await client.ping()
    await client.aclose()


async def test_a_single_server_is_neither_a_cluster_nor_a_sentinel(tmp_path: Path) -> None:
    port = free_port()
    with foreign_redis(tmp_path / "r", f"port {port}", "bind 127.0.0.1") as socket_url:
        await wait_redis(socket_url, patient(10))
        words = r"at 127\.0\.0\.1:\d+ is no node of a cluster: .*allowed: .*without \+cluster"
        with pytest.raises(ConfigError, match=words):
            await wait_redis(f"redis+cluster://127.0.0.1:{port}", patient(5))
        words = r"at 127\.0\.0\.1:\d+ is no Sentinel: .*; allowed: .*without \+sentinel"
        with pytest.raises(ConfigError, match=words):
            await wait_redis(f"redis+sentinel://127.0.0.1:{port}/store", patient(5))
        url = f"redis+sentinel://127.0.0.1:{port}/store?sentinel_password=x"
        with pytest.raises(ConfigError, match=r"lets nobody in .*; allowed: sentinel_password="):
            await wait_redis(url, patient(5))


async def test_a_master_that_no_sentinel_watches_is_refused_with_those_that_are(
    sentinel: Watched,
) -> None:
    url = sentinel.url.replace(NAME, "another")
    with pytest.raises(ConfigError, match=f"seen: another; allowed: .*{NAME}"):
        await wait_redis(url, patient(5))
    client = connect(url)
    with pytest.raises(ConfigError, match="no such master"), redis_errors(client, "a read"):
        await client.get("n")
    await client.aclose()


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_servers_that_are_all_away_are_unavailable_by_their_address(kind: str) -> None:
    port = free_port()
    url = f"redis+{kind}://:s3cret@127.0.0.1:{port}" + ("/store" if kind == "sentinel" else "")
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.* does not answer") as told:
        await wait_redis(url, 0.5)
    assert "s3cret" not in str(told.value)
    client = connect(url, outage_s=0.2)
    stream = RedisStream(client, run_key("r", "s"), outage_s=0.2)
    for call in (stream.append({}, b"x"), stream.read("g", "c", 1, 0.1)):
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port} does not answer"):
            await call
    await stream.close()
    await client.aclose()


async def test_a_cluster_without_one_of_its_masters_is_down(own_cluster: Cluster) -> None:
    await wait_redis(own_cluster.url, patient(10))
    own_cluster.masters[-1].kill()
    with pytest.raises(Unavailable, match=r"is down: 127\.0\.0\.1|Connection"):
        await wait_redis(own_cluster.url, 5.0)


async def test_every_master_of_a_cluster_is_judged(own_cluster: Cluster, tmp_path: Path) -> None:
    sync = "appendfsync is everysec: a crash of its machine loses what was just acknowledged"
    alone = "a master has no replica: nothing takes its place"
    assert await check_durable(own_cluster.url) == f"{NO_PASSWORD}; {alone}; {sync}"
    last = own_cluster.masters[-1]
    for name, value in (("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")):
        last.ask("CONFIG", "SET", name, value)
    with pytest.raises(ConfigError, match=r"throws keys away.*seen: maxmemory-policy allkeys-lru"):
        await check_durable(own_cluster.url)
    with pytest.raises(ConfigError, match=r"too few replicas; seen: 0; allowed: replicas=1"):
        await check_durable(f"{own_cluster.url}?replicas=1")
    redis_config = RedisConfig(durable_url=own_cluster.url)
    config = ServiceConfig(run=RunConfig(dir=str(tmp_path)), redis=redis_config)
    with pytest.raises(ConfigError, match="throws keys away"):
        await Supervisor([launch_of(service("redis"), config, [])], tmp_path).start(patient(20.0))


async def test_what_a_failover_may_lose_is_said_unless_replicas_have_every_write(
    sentinel: Watched,
) -> None:
    said = await check_durable(sentinel.url)
    assert said.endswith(
        "a failover loses what its replica has not got yet: add ?replicas=1 to the URL"
    )
    assert await check_durable(f"{sentinel.url}?replicas=1") == NO_PASSWORD


WRITES: dict[str, Callable[[redis.asyncio.Redis, str], Awaitable[object]]] = {
    "command": lambda client, key: client.set(key, 1),
    "script": lambda client, key: client.register_script("redis.call('SET', KEYS[1], 1)")([key]),
    "transaction": lambda client, key: client.pipeline(transaction=True).set(key, 1).execute(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_a_write_that_too_few_replicas_have_does_not_count(
    sentinel: Watched,
    run_id: str,
    write: Callable[[redis.asyncio.Redis, str], Awaitable[object]],
) -> None:
    # So long a write waits for two, in which even a busy machine's only one has it.
    client = connect(f"{sentinel.url}?replicas=2", outage_s=3.0)
    key = run_key(run_id, "n")
    assert await client.get(key) is None  # a read waits for nobody
    with pytest.raises(Unavailable, match="1 of 2 replicas have it"), redis_errors(client, "write"):
        await write(client, key)
    await client.aclose()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_over_a_cluster_ends_with_every_trajectory_trained(
    own_cluster: Cluster, tmp_path: Path
) -> None:
    process = demo(tmp_path, "--steps", "2", *SMALL, f"redis.durable_url={own_cluster.url}")
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    assert "a master has no replica" in output
    summary = json.loads((tmp_path / "demo-0-1" / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (2, "finished")
    assert summary["trajectories_published"] == summary["trajectories_trained"] == 2 * 16
    assert summary["trajectories_lost"] == 0
    assert left_over(tmp_path) == []
    keys = [node.ask("DBSIZE") for node in own_cluster.masters]
    assert sum(1 for count in keys if count) == 1
