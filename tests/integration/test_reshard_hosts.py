"""The policy trainer, whose ranks are on two hosts, goes over to another number of them."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest
from integration.policy_world import World, policy_world
from integration.test_rank_hosts import host, model_dir, world
from integration.test_reshard import same, trained

from benchmarks.processes import running
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.streams import Ledger

__all__ = ["model_dir", "world"]  # fixtures
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("own_forkserver")]
RANK = "paceline.services.policy_trainer.rank"
SPREAD = {"hosts": "[2,2]", "ranks": 0, "checkpoint_interval_steps": 10}
UNEVEN = {"hosts": "[1,2]", "ranks": 0}


@pytest.mark.slow
async def test_steps_after_a_change_are_those_of_a_trainer_started_with_as_many_bit_for_bit(
    tmp_path: Path, model_dir: Path, redis_url: str, run_id: str
) -> None:
    async with policy_world(tmp_path / "a", model_dir, redis_url, f"{run_id}-a") as restarted:
        for step, ranks in enumerate((4, 2, 3)):
            await restarted.start(ranks=ranks, checkpoint_interval_steps=10)
            await trained(restarted, step)
            await restarted.stop()
    async with policy_world(tmp_path / "b", model_dir, redis_url, f"{run_id}-b") as changed:
        changed.address = f"127.0.1.1:{free_port()}"
        async with host(changed, **SPREAD) as other:
            await changed.start(**SPREAD)
            await trained(changed, 0)
            for step, ranks in ((1, 2), (2, 3)):
                resharded, _, stepped, _ = await trained(changed, step, ranks=ranks)
                assert (resharded.failure, resharded.ranks) == ("", ranks)
                assert stepped.world_size == ranks
                pids = [one.pid for one in running(RANK, other.pid)]
                assert list((await changed.status()).rank_pids)[-1:] == pids
            count = await Ledger(changed.client, changed.run).count()
            assert (count.final, count.trained, count.open, count.lost) == (36, 36, 0, 0)
    for version in (1, 2, 3):
        assert same(changed.weights(version), restarted.weights(version))


async def test_ranks_that_no_host_has_a_place_for_or_whose_host_dies_leave_those_of_before(
    world: World,
) -> None:
    async with host(world, **UNEVEN):
        await world.start(**UNEVEN)
        resharded, _, stepped, _ = await trained(world, 0, ranks=4)
        assert (resharded.ranks, stepped.world_size) == (3, 3)
        assert "seen: 4 ranks, hosts=[1, 2]; allowed: 1 to 3" in resharded.failure
        assert (await trained(world, 1, ranks=1))[0].ranks == 1
    await world.stop(signal.SIGKILL)
    await world.start(**UNEVEN)  # a host that holds no rank need not be there
    assert (await trained(world, 2))[1].world_size == 1
    async with host(world, **UNEVEN) as first:
        assert (await trained(world, 3, ranks=2))[0].ranks == 2
        (before,) = running(RANK, first.pid)
        changing = asyncio.create_task(trained(world, 4, ranks=3))
        await others_start(first.pid, before)
        first.kill()
        async with host(world, **UNEVEN):
            resharded, _, stepped, _ = await changing
    assert resharded.failure == "host 1 of policy_trainer is gone with its ranks"
    assert (resharded.ranks, stepped.world_size, stepped.policy_version) == (2, 2, 5)
    count = await Ledger(world.client, world.run).count()
    assert (count.final, count.trained, count.open, count.lost) == (60, 60, 0, 0)


async def others_start(host_pid: int, before: psutil.Process) -> None:
    """Until ranks that were not there start on the host."""
    async with asyncio.timeout(patient(60)):
        while True:
            if {one.pid for one in running(RANK, host_pid)} - {before.pid}:
                return
            await asyncio.sleep(0.02)
