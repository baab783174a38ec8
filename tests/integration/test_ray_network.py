"""A run over hosts of a network; nodes are killed in a phase of a step, cut off, or slow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq.auth
from certificates import authority
from demo_runs import left_over, wait_for
from journal_tail import Entry, JournalTail
from net_hosts import WITH_NAMESPACES, WITH_TAPS
from ray_nodes import WITH_RAY, RayNode, host_of, ray_nodes, run_over_nodes, started
from redis_servers import foreign_redis

from benchmarks.chaos.remains import read_remains
from benchmarks.chaos.verdict import judge
from benchmarks.namespaces import NETWORK, Host, hosts
from paceline.local.patience import patient
from paceline.local.ports import free_ports

pytestmark = [
    WITH_RAY,
    WITH_NAMESPACES,
    pytest.mark.ray,
    pytest.mark.network,
    pytest.mark.timeout(900),
]
STEPS, PROMPTS, SAMPLES = 6, 4, 4  # prompts and samples as demo_runs.SMALL has them
RUN_ID = "demo-0-1"
HEAD = f"{NETWORK}.1"
REDIS_PORT, TLS_PORT = 6390, 6391
OPEN = ("security.allow_insecure=true", f"redis.durable_url=redis://{HEAD}:{REDIS_PORT}/0")
TLS_FRONT = Path(__file__).parents[1] / "tls_front.py"
CUT_S = 10
PHASES: dict[str, Callable[[Entry], bool]] = {
    "rollout": lambda entry: entry["event"] == "StepBegan",
    "policy": lambda entry: any(holder == "policy" for _, _, holder, _ in entry["slots"]),
    "drafter": lambda entry: entry["event"] == "DrafterActivated",
    "push": lambda entry: entry["event"] == "PolicyStepped",
    "commit": lambda entry: entry["event"] == "PolicyPrepared",
}
"""The first journal entry of each phase."""


@dataclass
class Network:
    """Three hosts with a Ray node each; the first host is the head, where runs start."""

    address: str  # of the cluster
    hosts: dict[str, Host]
    nodes: dict[str, RayNode]

    @property
    def head(self) -> Host:
        return next(iter(self.hosts.values()))

    def lose(self, address: str) -> None:
        """Kills all processes of a host and restarts it; the host joins as a new node."""
        self.hosts[address].kill()
        self.nodes[address].kill()
        self.hosts[address].mend()
        join = f"--address={self.address}"
        self.nodes[address] = started(address, 1, join, within=self.hosts[address].within)


@contextmanager
def network(**link: float) -> Iterator[Network]:
    """`link`: settings of the link between the last host and the other hosts."""
    with hosts(3, slow=(2,) if link else (), **link) as made:
        cpus = {one.address: int(one is not made[0]) for one in made}
        within = {one.address: one.within for one in made}
        port = free_ports(1)[0]  # Ray searches all processes of the machine for its address
        with ray_nodes(cpus, port, within=within) as nodes:
            yield Network(f"{HEAD}:{port}", {one.address: one for one in made}, nodes)


@pytest.fixture(autouse=True, scope="module")
def _token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "of-a-network-that-tests-make-here" * 2)
        patch.setenv("RAY_AUTH_MODE", "token")
        yield


@pytest.fixture(scope="module")
def net(_token: None) -> Iterator[Network]:
    with network() as made:
        yield made


@dataclass
class Watched:
    """A run under way, and its Redis."""

    directory: Path
    process: subprocess.Popen[str]
    redis: str

    def host_of_trainers(self) -> str:
        return host_of(self.directory / RUN_ID, "policy_trainer")

    def output(self) -> str:
        """The rest of the run's output; the run must end well."""
        output, _ = self.process.communicate(timeout=patient(400))
        assert self.process.returncode == 0, output
        return output


@contextmanager
def run_on(
    net: Network, directory: Path, ways: Sequence[str] = OPEN, password: str = ""
) -> Iterator[Watched]:
    """A run after its first step; its Redis serves inside the block. `ways`: the settings of access
    between its processes.
    """
    redis, within = directory / "run" / "redis-durable", net.head.within
    served = ["appendonly yes", f"port {REDIS_PORT}", f"bind {HEAD}", "protected-mode no"]
    served += [f"requirepass {password}"] if password else []
    with foreign_redis(redis, *served, within=within) as url:
        process = run_over_nodes(
            directory,
            net.address,
            *("--steps", str(STEPS), "coordinator.schedule=sync", "coordinator.max_policy_lag=0"),
            *ways,
            within=within,
        )
        try:
            wait_for(process, "step 1/")
            yield Watched(directory, process, url)
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=patient(60))


@pytest.fixture(scope="module")
def batches() -> list[list[str]]:
    """Hashes of the batches of the judged runs."""
    return []


def judge_run(directory: Path, batches: list[list[str]]) -> None:
    """Asserts that a run did all its steps and trained the batches of the runs before it. Redis'
    log must show no lost and no doubled sample.
    """
    summary = json.loads((directory / RUN_ID / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (STEPS, "finished")
    assert summary["trajectories_lost"] == 0
    (directory / "kept").mkdir()
    (directory / "kept" / "hashes.json").write_text("{}")
    verdict = judge(read_remains(directory, RUN_ID), STEPS, PROMPTS, SAMPLES, None)
    assert (verdict.lost, verdict.duplicated, verdict.disordered) == ([], [], [])
    assert verdict.trained == STEPS * PROMPTS * SAMPLES
    assert left_over(directory) == []
    trained: dict[int, set[str]] = {}  # by policy version; a repeated step is the same
    for line in (directory / RUN_ID / "journal.jsonl").read_text().splitlines():
        _, _, event, data, *_ = json.loads(line)
        if event == "PolicyStepped":
            trained.setdefault(data["policy_version"], set()).add(data["details"]["batch_hash"])
    assert sorted(trained) == list(range(1, STEPS + 1))
    batches.append([",".join(sorted(trained[version])) for version in sorted(trained)])
    assert batches[-1] == batches[0]


@pytest.mark.parametrize("phases", [("rollout", "policy", "drafter"), ("push", "commit")])
def test_a_node_of_trainers_that_is_killed_in_a_phase_costs_nothing(
    phases: tuple[str, ...], net: Network, tmp_path: Path, batches: list[list[str]]
) -> None:
    with run_on(net, tmp_path) as run:
        journal = JournalTail(run.redis, RUN_ID)
        for phase in phases:
            journal.until(PHASES[phase], 120)
            net.lose(run.host_of_trainers())
            journal.until(lambda entry: entry["event"] == "Resumed", 200)
        output = run.output()
    assert output.count("the run is resumed") == len(phases)
    judge_run(tmp_path, batches)


def test_a_run_outlives_a_partition_of_ten_seconds(
    net: Network, tmp_path: Path, batches: list[list[str]]
) -> None:
    with run_on(net, tmp_path) as run:
        host = net.hosts[run.host_of_trainers()]
        host.cut()
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(CUT_S)
        host.mend()
        output = run.output()
    assert "the run is resumed" not in output
    judge_run(tmp_path, batches)


def test_a_node_that_is_cut_off_for_long_counts_as_lost(
    net: Network, tmp_path: Path, batches: list[list[str]]
) -> None:
    with run_on(net, tmp_path) as run:
        host = run.host_of_trainers()
        net.hosts[host].cut()
        wait_for(run.process, "the run is resumed")
        net.lose(host)
        run.output()
    judge_run(tmp_path, batches)


def test_a_run_outlives_a_node_that_is_slow(
    net: Network, tmp_path: Path, batches: list[list[str]]
) -> None:
    with run_on(net, tmp_path) as run, net.hosts[run.host_of_trainers()].slowed():
        output = run.output()
    assert "the run is resumed" not in output
    judge_run(tmp_path, batches)


@contextmanager
def closed_ways(
    net: Network, directory: Path, tls: dict[str, str], password: str
) -> Iterator[list[str]]:
    """Settings that require token and certificate from every client, and TLS in front of Redis."""
    _, curve_key = zmq.auth.create_certificates(directory, "events")
    redis = directory / "run" / "redis-durable" / "s"
    front = [sys.executable, str(TLS_FRONT), HEAD, str(TLS_PORT)]
    front += [tls["tls_cert"], tls["tls_key"], str(redis)]
    process = subprocess.Popen([*net.head.within, *front], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        url = f"rediss://:{password}@{HEAD}:{TLS_PORT}/0?ssl_ca_certs={tls['tls_ca']}"
        settings = [f"security.{name}={path}" for name, path in tls.items()]
        yield [*settings, f"security.curve_key={curve_key}", f"redis.durable_url={url}"]
    finally:
        process.kill()
        process.communicate()


@WITH_TAPS
def test_a_link_that_is_slow_and_loses_frames_costs_nothing_under_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[list[str]]
) -> None:
    every = [f"{NETWORK}.{number}" for number in (1, 2, 3)]
    security = authority(tmp_path, "network", "PACELINE_TOKEN", ["127.0.0.1", *every])
    tls = {name: getattr(security, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    monkeypatch.setenv("PACELINE_TOKEN", "of-operators-" * 4)
    for name, variable in zip(tls, ("SERVER_CERT", "SERVER_KEY", "CA_CERT"), strict=True):
        monkeypatch.setenv(f"RAY_TLS_{variable}", tls[name])
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with (
        network(delay_ms=20.0, loss=0.01) as net,
        closed_ways(net, tmp_path, tls, "of-redis") as ways,
        run_on(net, tmp_path, ways, "of-redis") as run,
    ):
        output = run.output()
    assert "the run is resumed" not in output
    judge_run(tmp_path, batches)
