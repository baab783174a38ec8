"""The policy trainer goes over to another number of ranks between two steps."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.policy_world import World, policy_world, save_tiny_policy

from paceline.streams import Ledger

pytestmark = pytest.mark.timeout(300)
ONE_RANK_FEWER = """
import os

from paceline.services.policy_trainer.algorithms.grpo import Grpo


class OneRankFewer(Grpo):
    def __init__(self, settings):
        super().__init__(settings)
        if os.environ["RANK"] == "2":
            raise SystemExit("no room for a third rank")
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_policy(directory)
    return directory


class Runs:
    """Runs of the same tasks from the same start policy, each in a directory of its own."""

    def __init__(self, directory: Path, model: Path, url: str, run_id: str) -> None:
        self._directory, self._model, self._url, self._id = directory, model, url, run_id

    @asynccontextmanager
    async def run(self, name: str) -> AsyncIterator[World]:
        directory = self._directory / name
        async with policy_world(directory, self._model, self._url, f"{self._id}-{name}") as one:
            yield one


@pytest.fixture
def runs(tmp_path: Path, model_dir: Path, redis_url: str, run_id: str) -> Runs:
    return Runs(tmp_path, model_dir, redis_url, run_id)


async def trained(world: World, step: int, ranks: int = 0) -> list[Any]:
    """The news of a step from its rollouts to the commit of its weights."""
    await world.append(step, step)
    news = await world.step(step, step, ranks=ranks)
    await world.commit(step + 1)
    return news


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of any weight."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


async def figures(world: World, before: int, after: int, restarted: bool) -> list[dict[str, float]]:
    """What four steps measure, the last two with another number of ranks: of the running trainer,
    or of one that is started again.
    """
    await world.start(ranks=before, checkpoint_interval_steps=10)
    news = [await trained(world, step) for step in (0, 1)]
    if restarted:
        await world.stop()
        await world.start(ranks=after, checkpoint_interval_steps=10)
        news.append(await trained(world, 2))
    else:
        resharded, *rest = await trained(world, 2, ranks=after)
        assert (resharded.ranks, resharded.failure) == (after, "")
        news.append(rest)
    news.append(await trained(world, 3))
    assert [one[1].world_size for one in news] == [before, before, after, after]
    assert [one[-1].policy_version for one in news] == [1, 2, 3, 4]
    count = await Ledger(world.client, world.run).count()
    assert (count.final, count.trained, count.open, count.lost) == (48, 48, 0, 0)
    return [{name: one[1].figures[name] for name in ("loss", "grad_norm")} for one in news]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 1)])
async def test_steps_after_a_change_are_those_of_a_trainer_started_with_as_many_bit_for_bit(
    runs: Runs, before: int, after: int
) -> None:
    async with runs.run("changed") as changed:
        told = await figures(changed, before, after, restarted=False)
    async with runs.run("restarted") as restarted:
        assert told == await figures(restarted, before, after, restarted=True)
    for version in range(1, 5):
        assert same(changed.weights(version), restarted.weights(version))
    async with runs.run("constant") as constant:
        kept = await figures(constant, after, after, restarted=False)
    assert 0 <= apart(changed.weights(4), constant.weights(4)) < 1e-5
    for one, other in zip(told, kept, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


async def test_a_rank_that_does_not_come_up_leaves_the_ranks_that_there_were(runs: Runs) -> None:
    async with runs.run("refused") as world:
        file = world.directory.parent / "fewer.py"
        file.write_text(ONE_RANK_FEWER)
        await world.start(**{"algorithm.name": f"{file}:OneRankFewer"})
        await trained(world, 0)
        resharded, _, stepped, _ = await trained(world, 1, ranks=3)
        assert (resharded.ranks, stepped.world_size, stepped.policy_version) == (2, 2, 2)
        assert "rank 2 of policy_trainer.rank" in resharded.failure
        assert "no room for a third rank" in resharded.failure
        resharded, _, stepped, _ = await trained(world, 2, ranks=1)
        assert (resharded.failure, stepped.world_size) == ("", 1)
    async with runs.run("undisturbed") as other:
        await other.start()
        for step in (0, 1):
            await trained(other, step)
        await trained(other, 2, ranks=1)
    for version in (1, 2, 3):
        assert same(world.weights(version), other.weights(version))


async def test_a_chosen_number_outlives_the_trainer_until_its_setting_changes(runs: Runs) -> None:
    async with runs.run("again") as world:
        await world.start(ranks=2)
        await trained(world, 0, ranks=1)
        before = list((await world.status()).rank_pids)
        assert (await trained(world, 1, ranks=1))[0].ranks == 1
        assert list((await world.status()).rank_pids) == before, "started anew for nothing"
        await world.stop(signal.SIGKILL)
        await world.start(ranks=2)
        assert (await world.status()).ranks == 1
        await trained(world, 2)
        await world.stop(signal.SIGKILL)
        await world.start(ranks=3)
        assert (await world.status()).ranks == 3
        assert (await trained(world, 3))[1].world_size == 3
        ledger = Ledger(world.client, world.run)
        count = await ledger.count()
        assert (count.final, count.trained, count.open, count.lost) == (48, 48, 0, 0)
