"""A policy trainer restarts with another number of ranks and continues from its checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.policy_world import World, policy_world, save_tiny_policy

from paceline.streams import Ledger

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_policy(directory)
    return directory


class Runs:
    """Runs of the same tasks from the same start policy, each in a separate directory."""

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


async def trained(world: World, step: int) -> list[Any]:
    """The news of a step from its rollouts to the commit of its weights."""
    await world.append(step, step)
    news = await world.step(step, step)
    await world.commit(step + 1)
    return news


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of any weight."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


async def figures(world: World, before: int, after: int) -> list[dict[str, float]]:
    """Figures of four steps; the last two steps run on `after` ranks of a restarted trainer."""
    await world.start(ranks=before, checkpoint_interval_steps=10)
    news = [await trained(world, step) for step in (0, 1)]
    await world.stop()
    await world.start(ranks=after, checkpoint_interval_steps=10)
    news += [await trained(world, step) for step in (2, 3)]
    assert [one[1].world_size for one in news] == [before, before, after, after]
    assert [one[-1].policy_version for one in news] == [1, 2, 3, 4]
    count = await Ledger(world.client, world.run).count()
    assert (count.final, count.trained, count.open, count.lost) == (48, 48, 0, 0)
    return [{name: one[1].figures[name] for name in ("loss", "grad_norm")} for one in news]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 1)])
async def test_steps_on_other_ranks_are_those_of_a_trainer_that_had_as_many_from_the_start(
    runs: Runs, before: int, after: int
) -> None:
    async with runs.run("changed") as changed:
        measured = await figures(changed, before, after)
    async with runs.run("constant") as constant:
        expected = await figures(constant, after, after)
    assert 0 <= apart(changed.weights(4), constant.weights(4)) < 1e-5
    for one, other in zip(measured, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
