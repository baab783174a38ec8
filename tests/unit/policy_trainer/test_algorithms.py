"""Advantages and losses against numbers worked out by hand or by plain Python floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from policy_trainer.algorithms import ALGORITHMS, TokenBatch
from policy_trainer.algorithms.advantages import group_relative
from policy_trainer.algorithms.corrections import truncated_importance
from policy_trainer.algorithms.losses import clipped_surrogate, token_entropy, token_logprobs
from policy_trainer.config import AlgorithmConfig

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.0, 2.0, 5.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def by_hand(normalize: bool) -> list[float]:
    """The formula with the statistics module, a group at a time."""
    made = []
    for reward, group in zip(REWARDS, GROUPS, strict=True):
        members = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        centred = reward - statistics.fmean(members)
        scale = statistics.stdev(members) + 1e-6 if normalize else 1.0
        made.append(0.0 if len(set(members)) == 1 else centred / scale)
    return made


@pytest.mark.parametrize("normalize", [True, False])
def test_group_relative_advantages_are_the_formula(normalize: bool) -> None:
    made = group_relative(torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS), normalize_std=normalize)
    assert made.shape == (10,)
    assert made.tolist() == pytest.approx(by_hand(normalize), rel=1e-12)


def test_groups_without_variance_or_siblings_have_advantage_exactly_zero() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 7.0])
    assert group_relative(rewards, torch.tensor([0, 0, 0, 1])).tolist() == [0.0] * 4
    assert group_relative(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_log_probs_and_entropy_are_those_of_the_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    total = math.exp(1.0) + math.exp(2.0) + math.exp(0.5)
    assert token_logprobs(logits, torch.tensor([1, 2])).tolist() == pytest.approx(
        [2.0 - math.log(total), -math.log(3)], rel=1e-12
    )
    chances = [math.exp(x) / total for x in (1.0, 2.0, 0.5)]
    assert token_entropy(logits).tolist() == pytest.approx(
        [-sum(p * math.log(p) for p in chances), math.log(3)], rel=1e-12
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.5, 2.0, -2.6, 1.0),  # clipped at 1.3
        (0.5, 2.0, -1.0, 0.0),  # the minimum keeps the unclipped side
        (0.5, -2.0, 1.6, 1.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 0.0),
    ],
)
def test_the_surrogate_is_clipped_on_the_side_that_gains(
    ratio: float, advantage: float, loss: float, clipped: float
) -> None:
    proximal = torch.tensor([-1.0], dtype=torch.float64)
    policy = proximal + math.log(ratio)
    losses, marks = clipped_surrogate(
        policy, proximal, torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.3
    )
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert marks.item() == clipped


def test_a_clipped_token_has_no_gradient_and_a_fresh_one_has_minus_its_advantage() -> None:
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    proximal = torch.tensor([-2.0, -1.0])
    losses, _ = clipped_surrogate(policy, proximal, torch.tensor([1.0, 3.0]), clip_low=0.2, clip_high=0.2)
    losses.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, -3.0]


def test_the_behavior_correction_is_capped_detached_and_off_by_default() -> None:
    proximal, behavior = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -4.0])
    weights = truncated_importance(proximal.requires_grad_(), behavior, cap=2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0], rel=1e-6)
    assert not weights.requires_grad
    tokens = TokenBatch(proximal, proximal.detach(), behavior, torch.tensor([1.0, 1.0]))
    assert ALGORITHMS["grpo"](AlgorithmConfig()).loss(tokens).loss_sum.item() == pytest.approx(-2.0)
    capped = ALGORITHMS["grpo"](AlgorithmConfig(behavior_cap=2.0)).loss(tokens)
    assert capped.loss_sum.item() == pytest.approx(-math.exp(0.5) - 2.0, rel=1e-6)
