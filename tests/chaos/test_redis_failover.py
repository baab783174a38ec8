"""A master dies and a replica takes its place, or a run's slot moves to another master, amid appends
and reads: nothing is lost and nothing doubled.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from redis_groups import Cluster, Node, cluster, watched
from stream_traffic import go_through

from paceline.streams import RedisStream, connect, run_key

pytestmark = pytest.mark.chaos


async def test_appends_and_reads_go_on_when_sentinel_names_another_master(
    tmp_path: Path, run_id: str
) -> None:
    with watched(tmp_path, replicas=2) as servers:
        client = connect(f"{servers.url}?replicas=1")
        stream = RedisStream(client, run_key(run_id, "s"))
        first = servers.master
        await go_through(stream, {150: first.kill})
        assert servers.master is not first
        await stream.close()
        await client.aclose()


async def test_appends_and_reads_go_on_when_a_replica_takes_over_in_a_cluster(
    tmp_path: Path, run_id: str
) -> None:
    with cluster(tmp_path, replicas=(2, 0, 0)) as servers:
        run_id = servers.run_at(0)
        client = connect(f"{servers.url}?replicas=1")
        stream = RedisStream(client, run_key(run_id, "s"))
        await go_through(stream, {150: servers.masters[0].kill})
        await stream.close()
        await client.aclose()


async def test_appends_and_reads_go_on_when_the_slot_of_a_run_moves(
    tmp_path: Path, run_id: str
) -> None:
    with cluster(tmp_path) as servers:
        key = run_key(run_id, "s")
        source = servers.owner(key)
        targets = [node for node in servers.masters if node is not source]
        client = connect(servers.url)
        stream = RedisStream(client, key)
        there, back = partial(_move, servers, key, source, targets[0]), (servers, key, targets[0])
        await go_through(stream, {100: there, 200: partial(_move, *back, source)})
        assert source.ask("XLEN", key) == 0
        await stream.close()
        await client.aclose()


def _move(servers: Cluster, key: str, source: Node, target: Node) -> None:
    """Hand over a slot as redis-cli --cluster reshard does."""
    slot = source.ask("CLUSTER", "KEYSLOT", key)
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID"))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID"))
    while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 10):
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    for node in (target, source, *servers.masters):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.ask("CLUSTER", "MYID"))
