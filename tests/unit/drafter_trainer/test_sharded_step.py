"""The same optimiser steps on one rank and on ranks that come and go between activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file
from torch.nn import functional
from unit.drafter_trainer import sharded_step
from unit.drafter_trainer.samples import PROMPT, TARGET, sample, toy_policy
from unit.drafter_trainer.sharded_step import ROWS
from whole_tensors import whole_of

from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import on_cpu
from paceline.services.drafter_trainer.rows.sample import pack
from paceline.speculators.eagle import EagleNet
from paceline.training.checkpoints import PREFIX, checkpoint_numbers, read_checkpoint

Plan = list[list[tuple[int, int]]]
ALONE: Plan = [[(1, ROWS)], [(1, 2 * ROWS)]]
COMING_AND_GOING: Plan = [[(3, ROWS)], [(1, 2)], [(2, 4)], [(3, 3)], [(1, 3)]]
"""Ranks and rows of each activation; from the second on each ends in the middle of a step or begins
there.
"""
JOINING: Plan = [[(1, 1), (2, 2), (3, 3)], [(1, 6), (2, 2), (3, 3)], [(1, 1)]]
"""Ranks that join while it trains: in the middle of a step, between two steps, in the middle."""


def run(out: Path, world_size: int, plan: Plan) -> dict[str, torch.Tensor]:
    """Carries the plan out in `world_size` real gloo processes."""
    run_ranks(sharded_step.main, world_size, out.parent, out, plan)
    return load_file(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return run(tmp_path_factory.mktemp("alone") / "out", 1, ALONE)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("together") / "out"
    return out, run(out, 3, COMING_AND_GOING)


def reference() -> tuple[float, dict[str, torch.Tensor]]:
    """Summed loss and mean gradient of the first step, one forward a sequence, without packing,
    sharding or sums.
    """
    policy, net = toy_policy(), EagleNet(TARGET, seed=1)
    net.bind(policy.embed, policy.head)
    losses = []
    for seed in range(4 * ROWS):
        tokens, hidden = policy.rows(9 + 3 * (seed // 4 % 4) + seed % 4, seed)
        length = len(tokens) - 2
        features = net.features(hidden[None, :-1], tokens[None, 1:-1], torch.arange(length)[None])[
            0
        ]
        for t in range(PROMPT - 2, length):
            target = policy.head @ hidden[t + 1]
            soft = -(target.softmax(-1) * (policy.head @ features[t]).log_softmax(-1)).sum()
            losses.append(functional.smooth_l1_loss(features[t], hidden[t + 1]) + 0.1 * soft)
    torch.stack(losses).mean().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in net.named_parameters()
        if parameter.grad is not None
    }
    return float(torch.stack(losses).detach().sum()), gradients


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in the 2-norm."""
    return float((a - b).double().norm() / b.double().norm())


def test_three_ranks_step_as_one_and_as_plain_torch(
    alone: dict[str, torch.Tensor], together: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    loss, gradients = reference()
    one, three = alone, together[1]
    for figures in (one["first.figures"], three["first.figures"]):
        assert figures[0] == 1
        assert abs(float(figures[1]) - loss) < 1e-5 * loss
    start = EagleNet(TARGET, seed=1).state_dict()
    for name in start:
        weights, moments = f"first.{name}", f"first.exp_avg.{name}"
        assert relative(three[weights], one[weights]) < 1e-5, name
        assert relative(three[f"first.live.{name}"], one[f"first.live.{name}"]) < 1e-5, name
        assert relative(three[moments], one[moments]) < 1e-5, name
        # The first moment after one step is (1 - beta1) times the gradient: beta1 is 0.9.
        assert relative(one[moments], 0.1 * gradients[name]) < 1e-5, name
        assert relative(one[weights], start[name]) > 1e-4, name


def test_ranks_that_come_and_go_in_the_middle_of_a_step_change_nothing(
    alone: dict[str, torch.Tensor], together: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    same_learning(alone, together[1])


@pytest.mark.slow
def test_ranks_that_join_while_others_train_change_nothing(
    alone: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    same_learning(alone, run(tmp_path / "out", 3, JOINING))


def same_learning(one: dict[str, torch.Tensor], many: dict[str, torch.Tensor]) -> None:
    """Weights, moments, steps, losses and positions."""
    assert one["last.figures"][0] == many["last.figures"][0] == 3
    assert one["last.figures"][2] == many["last.figures"][2] > one["first.figures"][2]
    assert relative(many["last.figures"], one["last.figures"]) < 1e-5
    for name in EagleNet(TARGET, seed=1).state_dict():
        for kind in ("last.", "last.live.", "last.exp_avg."):
            assert relative(many[kind + name], one[kind + name]) < 1e-5, kind + name
        assert relative(one[f"last.{name}"], one[f"first.{name}"]) > 1e-4, name


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_three_ranks_is_read_by_one(
    together: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    out, three = together
    learner = DrafterLearner(EagleNet(TARGET, seed=9), DrafterOptimizerConfig(), micro_batches=1)
    directory = out.with_suffix(".checkpoints")
    checkpoint = directory / f"{PREFIX}{checkpoint_numbers(directory)[-1]}"
    assert len(list(checkpoint.glob("shards/*.safetensors"))) == 3
    learner.load_state(read_checkpoint(checkpoint, learner.state()))
    assert learner.total_steps == 1
    loaded = learner.state()
    for name, value in learner.snapshot().state_dict().items():
        assert torch.equal(value, three[f"first.{name}"])
        assert torch.equal(whole_of(loaded[f"exp_avg/{name}"]), three[f"first.exp_avg.{name}"])


@pytest.mark.usefixtures("one_rank")
def test_ranks_that_begin_again_step_as_a_drafter_that_begins_with_those_weights(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    run_ranks(sharded_step.begins_again, 2, tmp_path, out)
    found = load_file(out)
    start = EagleNet(TARGET, seed=2)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    for name, value in before.items():
        assert torch.equal(found[f"begun.{name}"], value), name
    config = DrafterOptimizerConfig(lr=1e-2, warmup_steps=0, clip_norm=1e9)
    fresh = DrafterLearner(start, config, micro_batches=ROWS, members=on_cpu(1))
    for seed in range(ROWS):
        fresh.micro_step(pack([sample(12, seed)], window=512), toy_policy().policy_head())
    for name, value in sharded_step.part_of(fresh.state(), "model/").items():
        moved = value - before[name]
        assert relative(found[f"learned.{name}"] - before[name], moved) < 1e-3, name
