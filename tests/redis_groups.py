"""Several Redis servers that stand in for each other: a cluster of masters, a master with a replica
and Sentinels. Real servers, which a test may kill.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis_servers import start_redis

from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.streams import run_key

SLOTS = 16384
NAME = "run-store"
"""What the Sentinels call the master."""
_BUS = 10_000
"""A cluster's servers speak to each other at a port that is so much higher."""


@dataclass
class Node:
    """One server of several."""

    port: int
    directory: Path
    lines: tuple[str, ...]
    sentinel: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        settings = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.directory}", *self.lines]
        if not self.sentinel:
            settings += ['save ""', "appendonly yes", "repl-diskless-sync-delay 0"]
        words, file = (("--sentinel",), self.directory / "conf") if self.sentinel else ((), None)
        self.process = start_redis("\n".join(settings), self.directory / "log", words, file)
        until(lambda: bool(self.ask("PING")))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def ask(self, *words: Any) -> Any:
        with redis.Redis(
            port=self.port, socket_timeout=patient(10.0), decode_responses=True
        ) as one:
            return one.execute_command(*words)


def until(holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Wait for something that servers agree on among themselves."""
    end = time.monotonic() + patient(deadline_s)
    while True:
        with contextlib.suppress(redis.ConnectionError, redis.ResponseError):
            if holds():
                return
        assert time.monotonic() < end, "the servers do not agree"
        time.sleep(0.02)


@dataclass
class Cluster:
    """Masters, and as many replicas of each."""

    masters: list[Node]
    replicas: list[Node]

    @property
    def url(self) -> str:
        return f"redis+cluster://{self.masters[0].address},{self.masters[1].address}"

    def run_at(self, index: int) -> str:
        """Id of a run that a master has."""
        ids = (f"run-{n}" for n in range(1000))
        wanted = self.masters[index]
        return next(one for one in ids if self.owner(run_key(one, "s")) is wanted)

    def owner(self, key: str) -> Node:
        """The master whose slot a key is in."""
        slot = self.masters[0].ask("CLUSTER", "KEYSLOT", key)
        return self.masters[slot * len(self.masters) // SLOTS]


@contextmanager
def cluster(directory: Path, replicas: Sequence[int] = (0, 0, 0)) -> Iterator[Cluster]:
    """A cluster that serves all slots, each master with so many replicas."""
    masters = len(replicas)
    lines = ("cluster-enabled yes", "cluster-node-timeout 500", "cluster-replica-validity-factor 0")
    ports = _ports(masters + sum(replicas))
    nodes = [Node(port, directory / f"node-{port}", lines) for port in ports]
    with ExitStack() as stack:
        _start(stack, nodes)
        made = Cluster(nodes[:masters], nodes[masters:])
        for index, node in enumerate(made.masters):
            first, end = (-(-SLOTS * at // masters) for at in (index, index + 1))
            node.ask("CLUSTER", "ADDSLOTS", *range(first, end))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in nodes[1:]:
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        until(lambda: all(_knows(node, nodes) for node in nodes))
        follows = [made.masters[index] for index, n in enumerate(replicas) for _ in range(n)]
        for node, master in zip(made.replicas, follows, strict=True):
            node.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID"))
        until(lambda: all(_serves(node) for node in nodes))
        for node, count in zip(made.masters, replicas, strict=True):
            until(partial(_has_replicas, node, count))
        yield made


@dataclass
class Watched:
    """A master, its replicas and the Sentinel that watches them."""

    servers: list[Node]
    sentinel: Node

    @property
    def url(self) -> str:
        return f"redis+sentinel://{self.sentinel.address}/{NAME}"

    @property
    def master(self) -> Node:
        """Who is it now."""
        port = int(self.sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)[1])
        return next(node for node in self.servers if node.port == port)

    @property
    def sees(self) -> int:
        """Replicas that the Sentinel knows."""
        return len(self.sentinel.ask("SENTINEL", "REPLICAS", NAME))


@contextmanager
def watched(directory: Path, replicas: int = 1) -> Iterator[Watched]:
    """A master, replicas of which one takes its place after half a second, and a Sentinel."""
    first, *others, sentinel = _ports(2 + replicas)
    sync = "appendfsync always"
    follows = (sync, f"replicaof 127.0.0.1 {first}")
    servers = [
        Node(first, directory / "first", (sync,)),
        *(Node(port, directory / f"node-{port}", follows) for port in others),
    ]
    lines = (
        f"sentinel monitor {NAME} 127.0.0.1 {first} 1",
        f"sentinel down-after-milliseconds {NAME} 500",
        f"sentinel failover-timeout {NAME} 2000",
    )
    made = Watched(servers, Node(sentinel, directory / "sentinel", lines, sentinel=True))
    with ExitStack() as stack:
        _start(stack, servers)
        until(partial(_has_replicas, servers[0], replicas))
        _start(stack, [made.sentinel])
        until(lambda: made.sees == replicas)
        yield made


def _start(stack: ExitStack, nodes: Sequence[Node]) -> None:
    for node in nodes:
        stack.callback(node.kill)
        node.start()


def _ports(count: int) -> list[int]:
    """Free ports whose bus port is free too."""
    found: list[int] = []
    while len(found) < count:
        port = free_port()
        with contextlib.suppress(OSError), socket.socket() as bus:
            bus.bind(("127.0.0.1", port + _BUS))
            found.append(port)
    return found


def _knows(node: Node, others: Sequence[Node]) -> bool:
    lines = node.ask("CLUSTER", "NODES")
    text = lines if isinstance(lines, str) else json.dumps(lines)
    return all(other.address in text for other in others) and "handshake" not in text


def _serves(node: Node) -> bool:
    told = node.ask("CLUSTER", "INFO")
    return "ok" in (told if isinstance(told, str) else told["cluster_state"])


def _has_replicas(node: Node, count: int) -> bool:
    told = node.ask("INFO", "replication")
    online = ("online" in str(value) for name, value in told.items() if name.startswith("slave"))
    return sum(online) == count
