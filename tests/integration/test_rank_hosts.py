"""The policy's ranks on two hosts: what they train, and what becomes of them when one is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from integration.policy_world import World, policy_world, save_tiny_policy

from benchmarks.processes import running
from paceline.config import SecurityConfig
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.rpc import channel
from paceline.streams import Ledger
from paceline.v1.progress_pb2 import GetProgressRequest
from paceline.v1.progress_pb2_grpc import ProgressServiceStub

HOSTS = {"hosts": "[1,1]", "ranks": 0}

pytestmark = pytest.mark.usefixtures("own_forkserver")  # ranks are children of their host


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_policy(directory)
    return directory


@pytest.fixture
async def world(
    tmp_path: Path, model_dir: Path, redis_url: str, run_id: str
) -> AsyncIterator[World]:
    async with policy_world(tmp_path, model_dir, redis_url, run_id) as one:
        one.address = f"127.0.1.1:{free_port()}"
        yield one


@asynccontextmanager
async def host(
    world: World, number: int = 1, **settings: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that holds ranks of the world's trainer, as on another host."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "paceline.services.policy_trainer.rank_host",
        *("--host", str(number)),
        *world.settings(**{**HOSTS, **settings}),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def five_steps(world: World, **settings: object) -> list[bytes]:
    """The policy after each of five steps."""
    await world.start(**settings)
    made = []
    for step in range(5):
        await world.append(step, step)
        news = await world.step(step, step)
        assert news[1].world_size == 2
        await world.commit(step + 1)
        made.append((world.spools["gateway"].path(1, step + 1) / "model.safetensors").read_bytes())
    await world.stop()
    return made


async def test_five_steps_on_two_hosts_are_those_of_two_ranks_on_one_bit_for_bit(
    tmp_path: Path, model_dir: Path, redis_url: str, run_id: str
) -> None:
    async with policy_world(tmp_path / "one", model_dir, redis_url, f"{run_id}-1") as world:
        on_one = await five_steps(world)
    async with policy_world(tmp_path / "two", model_dir, redis_url, f"{run_id}-2") as world:
        world.address = f"127.0.1.1:{free_port()}"
        async with host(world) as other:
            on_two = await five_steps(world, **HOSTS)
            assert other.returncode is None, "the host waits for its service"
    assert on_two == on_one
    assert len(set(on_one)) == 5, "a step changed nothing"


async def test_a_step_whose_host_is_killed_fails_and_is_trained_by_the_next_one(
    world: World,
) -> None:
    """Ranks of the dead host end with it; those of the other are ended."""
    async with host(world) as first:
        await world.start(**HOSTS)
        before = (await world.status()).rank_pids
        family = [one.pid for one in psutil.Process(first.pid).children(recursive=True)]
        assert before[1] in family, "the second rank is not on the second host"
        assert before[0] not in family
        step = asyncio.create_task(world.step(0, 0))  # which waits for its groups
        await waits_for_groups(world)
        first.kill()
        with pytest.raises(Unavailable, match="host 1 of policy_trainer is gone with its ranks"):
            await step
        await first.wait()
        _, alive = psutil.wait_procs(
            [psutil.Process(pid) for pid in family if psutil.pid_exists(pid)], patient(10)
        )
        assert not alive, "ranks outlive their host"
    await world.append(0, 0)
    async with host(world):
        news = await world.step(0, 0)  # waits until a host of that number is there
        assert (news[1].world_size, news[-1].policy_version) == (2, 1)
        after = (await world.status()).rank_pids
        assert not {*before} & {*after}
        await world.stop()
    assert (await Ledger(world.client, world.run).count()).trained == 12


@pytest.mark.slow
async def test_a_rank_that_is_killed_on_another_host_is_started_there_again(world: World) -> None:
    async with host(world) as other:
        await world.start(**HOSTS)
        before = (await world.status()).rank_pids
        step = asyncio.create_task(world.step(0, 0))
        await waits_for_groups(world)
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"host 1: rank 1 of policy_trainer\.rank"):
            await step
        await world.append(0, 0)
        assert (await world.step(0, 0))[-1].policy_version == 1
        assert other.returncode is None


@pytest.mark.slow
async def test_a_trainer_that_is_killed_finds_its_hosts_again(world: World) -> None:
    async with host(world) as other:
        await world.start(**HOSTS)
        await world.append(0, 0)
        await world.step(0, 0)
        await world.commit(1)
        (rank,) = running("paceline.services.policy_trainer.rank", other.pid)
        await world.stop(signal.SIGKILL)
        _, alive = psutil.wait_procs([rank], patient(10))
        assert not alive, "a rank outlives its service"
        await world.start(**HOSTS)
        again = await world.step(0, 0)
        assert (again[-1].policy_version, again[-1].bytes) == (1, 0)
        assert other.returncode is None


@pytest.mark.parametrize(
    ("number", "settings", "said"),
    [
        (0, {}, "host 0 is the trainer's own; seen: --host 0"),
        (2, {}, "gives no ranks to this host"),
        (1, {"ranks": 3}, "policy_trainer.hosts and policy_trainer.ranks do not fit together"),
        (1, {"interface": "nowhere"}, "no such network interface"),
        (
            1,
            {"addresses.policy_trainer": "192.0.2.1:7402", "security.allow_insecure": "false"},
            "exchange weights and gradients without TLS",
        ),
        (1, {"optimizer.lr": 1e-5}, "host 1 has other settings .* seen: optimizer in the settings"),
        (2, {"hosts": "[1,1,1]"}, "no ranks are expected on this host; seen: host 2"),
    ],
)
async def test_a_host_that_does_not_fit_is_refused_by_name(
    world: World, number: int, settings: dict[str, object], said: str
) -> None:
    process = await world.spawn(**HOSTS)
    async with host(world, number, **settings) as refused:
        _, errors = await asyncio.wait_for(refused.communicate(), patient(60))
        assert refused.returncode in (1, 2)
        assert re.search(said, errors.decode()), errors.decode()
    process.kill()
    await process.wait()


async def test_a_trainer_whose_ranks_anybody_could_join_does_not_start(world: World) -> None:
    address = "192.0.2.1:7402"
    process = await world.spawn(**HOSTS, **{"addresses.policy_trainer": address})
    assert await asyncio.wait_for(process.wait(), patient(60)) == 2


async def waits_for_groups(world: World) -> None:
    """Until a step has begun, and its ranks wait for each other or for groups."""
    async with asyncio.timeout(patient(30)), channel(world.address, SecurityConfig()) as peer:
        while True:
            told = await ProgressServiceStub(peer).GetProgress(GetProgressRequest())
            if any("collects the groups" in part.doing for part in told.parts):
                return
