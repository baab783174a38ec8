"""An algorithm, added according to CONTRIBUTING.md, trains a step in the real policy trainer."""

from __future__ import annotations

import pytest
from integration.test_policy_trainer import World, model_dir, world
from recipes.checkout import Change, Checkout, places
from recipes.twins import ALGORITHM

P = "services/policy_trainer/algorithms"
IN_THE_TREE = (
    Change(f"{P}/twin.py", ALGORITHM),
    Change(
        f"{P}/__init__.py",
        '    "twin": "paceline.services.policy_trainer.algorithms.twin:Reversed",\n',
        '    "grpo": ',
    ),
)
__all__ = ["model_dir", "world"]


@pytest.mark.slow  # a separate trainer for each
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (IN_THE_TREE, "twin"),
        ((Change("my_algorithm.py", ALGORITHM),), "my_algorithm:Reversed"),
    ],
    ids=["table", "path"],
)
async def test_a_new_algorithm_trains_a_step(
    changes: tuple[Change, ...],
    name: str,
    checkout: Checkout,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout.change(changes)
    assert places(changes) <= 2, "a recipe touches two places at most"
    monkeypatch.setenv("PYTHONPATH", checkout.environment["PYTHONPATH"])
    await world.start(ranks=1, **{"algorithm.name": name})
    await world.append(0, 0)
    _, stepped, prepared = await world.step(0, 0)
    assert stepped.figures["grad_norm"] > 0
    assert prepared.policy_version == 1
