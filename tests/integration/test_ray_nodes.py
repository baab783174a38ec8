"""A run over several nodes of a real Ray cluster: rollouts on one node, trainers on another."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, left_over, outcome, wait_for
from ray_nodes import TOKEN, WITH_RAY, RayNode, host_of, ray_nodes, run_over_nodes, started

from paceline.cli.run_files import RunFiles
from paceline.cluster.launcher import RunOnCluster, on_cluster
from paceline.cluster.nodes import CPU, GPU, Pool
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.local.launch import Launch
from paceline.local.patience import patient
from paceline.local.ports import free_ports

pytestmark = [WITH_RAY, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
HEAD, NODES = "127.0.1.1", ("127.0.1.2", "127.0.1.3", "127.0.1.4")
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_AUTH_MODE", "token")
        yield


@pytest.fixture(scope="module")
def cluster(_token: None) -> Iterator[tuple[str, dict[str, RayNode]]]:
    """Address of a cluster, and its nodes: a head without slots and three nodes of one slot. The
    last test kills a node.
    """
    port = free_ports(1)[0]
    with ray_nodes({HEAD: 0, **dict.fromkeys(NODES, 1)}, port) as nodes:
        yield f"{HEAD}:{port}", nodes


def run_with_redis(out: Path, address: str, *words: str) -> subprocess.Popen[str]:
    redis = f"redis.durable_url=redis://127.0.0.1:{free_ports(1)[0]}"
    return run_over_nodes(out, address, "--steps", str(STEPS), redis, *words)


async def test_a_run_that_is_taken_up_waits_for_a_node_that_comes_back(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    pools = [Pool("rollout", ("gateway",), {CPU: 1.0})]
    asked = RunOnCluster(ServiceConfig(), [], [], tmp_path, pools, 60.0)
    with ray_nodes({HEAD: 0}, port) as nodes:
        address = f"{HEAD}:{port}"
        with pytest.raises(ConfigError, match="fewer slots than this run needs"):
            async with on_cluster(asked, address, lambda event: None):
                pass
        joining = asyncio.to_thread(started, NODES[0], 1, f"--address={address}")
        back = asyncio.create_task(joining)
        async with on_cluster(replace(asked, room_s=60.0), address, lambda event: None):
            nodes[NODES[0]] = await back


async def test_services_of_a_pool_see_the_gpus_of_its_slots_alone(
    tmp_path: Path,
) -> None:
    """Ray does not verify that a node has GPUs."""
    port = free_ports(1)[0]
    slots = {GPU: 3.0}
    pools = [Pool("control", ("coordinator",)), Pool("rollout", ("gateway",), slots)]
    asked = RunOnCluster(ServiceConfig(), [], [], tmp_path, pools, 60.0)
    with ray_nodes({HEAD: 1}, port, "--num-gpus=4"):
        async with on_cluster(asked, f"{HEAD}:{port}", lambda event: None) as cluster:
            kept = cluster.keep(Launch("rollout", ("",)), [])
            keeper = cluster._placed(kept.order)
            await keeper.begin.remote()
            variable = "CUDA_VISIBLE_DEVICES"  # of the keeper, whose services inherit it
            visible = (await keeper.__ray_call__.remote(lambda _: os.environ[variable])).split(",")
            await keeper.stop.remote(1.0)
    assert len(set(visible)) == 3
    assert set(visible) < {"0", "1", "2", "3"}


def test_several_nodes_need_a_redis_that_all_reach(
    tmp_path: Path, cluster: tuple[str, dict[str, RayNode]]
) -> None:
    process = run_with_redis(tmp_path, cluster[0], 'redis.durable_url=""')
    output, _ = process.communicate(timeout=patient(120))
    assert process.returncode != 0
    assert "a run on several nodes needs a Redis that all of them reach" in output
    assert " started (pid " not in output


def test_each_gateway_of_a_run_has_a_node(
    tmp_path: Path, cluster: tuple[str, dict[str, RayNode]]
) -> None:
    run, (grpc, http) = tmp_path / "demo-0-1", free_ports(2)
    more = (
        f'addresses.more_gateways=["127.0.0.1:{grpc}"]',
        f'addresses.more_gateways_http=["127.0.0.1:{http}"]',
    )
    process = run_with_redis(tmp_path, cluster[0], *more)
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    (second,) = RunFiles("", run).read_config()["addresses"]["more_gateways"]
    hosts = {second.rpartition(":")[0], host_of(run, "gateway"), host_of(run, "policy_trainer")}
    assert hosts == {*NODES}
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories_lost"]) == (STEPS, 0)
    assert left_over(tmp_path) == []


def rank_of(run: Path, rank: int) -> psutil.Process:
    """The process that writes the log of a policy rank."""
    log = str(run / f"logs/policy_trainer.rank-rank{rank}.log")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "policy_trainer.rank" not in " ".join(process.cmdline()):
                continue  # open files of all processes take seconds on a busy machine
            if log in [one.path for one in process.open_files()]:
                return process
    raise AssertionError(f"no process writes {log}")


def test_a_policy_on_two_nodes_has_the_weights_of_one_on_one_node_also_after_a_loss(
    tmp_path: Path, cluster: tuple[str, dict[str, RayNode]]
) -> None:
    runs = [tmp_path / one / "demo-0-1" for one in ("there", "here")]
    apart = ("coordinator.placement=disaggregated", "coordinator.learner_slots=2")
    rule = tmp_path / "lengths.py"
    rule.write_text(
        "class Length:\n    def score(self, episode): return len(episode.text) % 7 / 7\n"
    )
    learns = (f"gateway.rewards.own.length={rule}:Length", "coordinator.reward=length")
    ranks = ("policy_trainer.ranks=2", "gateway.engine.workers=1", "--steps", "4")
    words = (*SMALL, *apart, *learns, *ranks)
    redis = f"redis.durable_url=redis://127.0.0.1:{free_ports(1)[0]}"
    launched = ("--launcher", "ray", "--address", cluster[0], "run.policy_nodes=2")
    process = demo(tmp_path / "there", *words, redis, *launched)
    lines = wait_for(process, "step 1/")
    first, second = (rank_of(runs[0], rank) for rank in (0, 1))
    assert psutil.Process(first.ppid()).ppid() != psutil.Process(second.ppid()).ppid()
    second.kill()
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, "".join(lines) + output
    assert "rank 1 of policy_trainer.rank was killed by SIGKILL" in output
    assert "its ranks work again" in output
    output, _ = demo(tmp_path / "here", *words).communicate(timeout=patient(240))
    assert outcome(runs[0]) == outcome(runs[1]), output
    assert left_over(tmp_path) == []


def test_a_run_goes_on_elsewhere_when_the_node_of_its_trainers_is_lost(
    tmp_path: Path, cluster: tuple[str, dict[str, RayNode]]
) -> None:
    (address, nodes), run = cluster, tmp_path / "demo-0-1"
    process = run_with_redis(tmp_path, address)
    lines = wait_for(process, "step 1/")
    hosts = {name: host_of(run, name) for name in ("gateway", "policy_trainer", "coordinator")}
    assert hosts["coordinator"] == HEAD
    assert {hosts["gateway"], hosts["policy_trainer"]} < set(NODES)
    assert hosts["gateway"] != hosts["policy_trainer"]
    nodes[hosts["policy_trainer"]].kill()
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, "".join(lines) + output
    assert "the run is resumed on the remaining nodes" in output
    assert host_of(run, "policy_trainer") not in (hosts["policy_trainer"], HEAD)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (STEPS, "finished")
    assert summary["trajectories_lost"] == 0
    assert summary["trajectories_published"] == (
        summary["trajectories_trained"] + sum(summary["trajectories_dropped"].values())
    )
    assert left_over(tmp_path) == []
