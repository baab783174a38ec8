"""Nodes of a Ray cluster, each with its own address, and a run over the nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo

from paceline.cli.run_files import RunFiles
from paceline.local.patience import patient
from paceline.local.ports import free_ports

WITH_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
"""The check does not import Ray, because Ray reads its token's variables on import."""
TOKEN = "of-a-cluster-that-tests-start-" * 2
_START = Path(sys.executable).with_name("ray")


class RayNode:
    """One node: a process group that can be killed as a whole."""

    def __init__(self, host: str, cpus: int, *where: str, within: Sequence[str] = ()) -> None:
        """`where`: options that make it the head, or name the head; `within`: words before its
        command.
        """
        words = ["--block", f"--node-ip-address={host}", f"--num-cpus={cpus}", *where]
        words += ["--object-store-memory=80000000"]
        words += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        self.host = host
        self._process = subprocess.Popen(
            [*within, str(_START), "start", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )

    def starts(self) -> str:
        """The node's output if it does not start, else ""."""
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if "block forever" in line:
                return ""
        return "".join(said)

    def kill(self) -> None:
        """Kills the node and all its processes, like a power failure; otherwise its children would
        live until they notice.
        """
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(patient(30))

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(patient(30))
            finally:
                self.kill()


def started(host: str, cpus: int, *where: str, within: Sequence[str] = ()) -> RayNode:
    """A node. Ray allows 30 s for a start on any machine, so it may need several attempts."""
    for _ in range(4):
        node = RayNode(host, cpus, *where, within=within)
        if not (said := node.starts()):
            return node
        node.stop()
    raise AssertionError(said)


@contextmanager
def ray_nodes(
    cpus: dict[str, int], port: int, *more: str, within: Mapping[str, Sequence[str]] | None = None
) -> Iterator[dict[str, RayNode]]:
    """Nodes by host, each with so many cores; the first node is the head, with the options `more`.
    `within`: words before the commands of each host.
    """
    nodes: dict[str, RayNode] = {}
    head, *others = cpus
    before = dict.fromkeys(cpus, ()) if within is None else within
    try:
        client = f"--ray-client-server-port={free_ports(1)[0]}"
        words = ("--head", f"--port={port}", client, "--include-dashboard=false", *more)
        nodes[head] = started(head, cpus[head], *words, within=before[head])
        for host in others:
            join = f"--address={head}:{port}"
            nodes[host] = started(host, cpus[host], join, within=before[host])
        yield nodes
    finally:
        for node in reversed(nodes.values()):
            node.stop()


def run_over_nodes(
    out: Path, address: str, *words: str, within: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A demo with trainers and rollouts on different nodes."""
    apart = ("max_policy_lag=2", "placement=disaggregated", "learner_slots=1")
    chosen = [f"coordinator.{one}" for one in ("schedule=fully_async", *apart)]
    launched = ("--launcher", "ray", "--address", address)
    words = (*SMALL, *chosen, "gateway.engine.workers=1", *launched, *words)
    return demo(out, *words, within=within)


def host_of(run: Path, service: str) -> str:
    """Address of the node where a service of a run is now."""
    address: str = RunFiles("", run).read_config()["addresses"][service]
    return address.rpartition(":")[0].rpartition("//")[2]
