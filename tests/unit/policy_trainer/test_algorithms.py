"""Advantages and losses against numbers worked out by hand or by plain Python floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_trainer.algorithms import build_algorithm
from policy_trainer.algorithms.advantages import group_relative
from policy_trainer.algorithms.base import TokenBatch
from policy_trainer.algorithms.corrections import truncated_importance
from policy_trainer.algorithms.losses import clipped_surrogate, token_entropy, token_logprobs
from policy_trainer.batches.collected import reward_spread
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
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    made = group_relative(
        rewards, torch.tensor(GROUPS), torch.ones_like(rewards), normalize_std=normalize
    )
    assert made.shape == (10,)
    assert made.tolist() == pytest.approx(by_hand(normalize), rel=1e-12)


def test_groups_without_variance_or_siblings_have_advantage_exactly_zero() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 7.0])
    assert group_relative(rewards, torch.tensor([0, 0, 0, 1]), torch.ones(4)).tolist() == [0.0] * 4
    assert group_relative(
        torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    ).shape == (0,)


def unweighted(rewards: torch.Tensor, groups: torch.Tensor, *, normalize_std: bool) -> torch.Tensor:
    """The formula for sessions of one branch, in the same order of float operations."""
    count = int(groups.max().item()) + 1
    sizes = torch.zeros(count, dtype=rewards.dtype).index_add_(0, groups, torch.ones_like(rewards))
    mean = torch.zeros(count, dtype=rewards.dtype).index_add_(0, groups, rewards) / sizes.clamp(
        min=1
    )
    members = [rewards[groups == group] for group in range(count)]
    flat = torch.tensor(
        [bool((members[int(group)] == members[int(group)][0]).all()) for group in groups]
    )
    centred = torch.where(flat, 0.0, rewards - mean[groups])
    if not normalize_std:
        return centred
    squares = torch.zeros(count, dtype=rewards.dtype).index_add_(0, groups, centred.square())
    return centred / ((squares / (sizes - 1).clamp(min=1)).sqrt()[groups] + 1e-6)


@settings(max_examples=100, deadline=None)
@given(
    members=st.lists(
        st.tuples(st.integers(0, 4), st.floats(-100, 100, width=32)), min_size=1, max_size=24
    ),
    normalize=st.booleans(),
)
def test_with_all_weights_one_the_advantages_are_bit_equal_to_the_unweighted_formula(
    members: list[tuple[int, float]], normalize: bool
) -> None:
    groups = torch.tensor([group for group, _ in members])
    rewards = torch.tensor([reward for _, reward in members], dtype=torch.float32)
    made = group_relative(rewards, groups, torch.ones_like(rewards), normalize_std=normalize)
    assert torch.equal(made, unweighted(rewards, groups, normalize_std=normalize))


@settings(max_examples=100, deadline=None)
@given(
    sessions=st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 7)), min_size=1, max_size=8),
    normalize=st.booleans(),
)
def test_splitting_a_session_into_branches_of_its_reward_changes_no_advantage(
    sessions: list[tuple[int, int]], normalize: bool
) -> None:
    rewards = torch.tensor([float(reward) for reward, _ in sessions])
    whole = group_relative(
        rewards,
        torch.zeros(len(sessions), dtype=torch.int64),
        torch.ones_like(rewards),
        normalize_std=normalize,
    )
    branches = [(float(reward), 1 / count) for reward, count in sessions for _ in range(count)]
    made = group_relative(
        torch.tensor([reward for reward, _ in branches]),
        torch.zeros(len(branches), dtype=torch.int64),
        torch.tensor([weight for _, weight in branches]),
        normalize_std=normalize,
    )
    expected = [
        a for a, (_, count) in zip(whole.tolist(), sessions, strict=True) for _ in range(count)
    ]
    assert made.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_branches_with_rewards_of_their_own_are_weighed_by_the_formula() -> None:
    # Session x: one branch, reward 1. Session y: three branches, rewards 0, 0.5, 4. Session z: two,
    # rewards 2, 2.
    rewards, weights = [1.0, 0.0, 0.5, 4.0, 2.0, 2.0], [1.0, 1 / 3, 1 / 3, 1 / 3, 0.5, 0.5]
    mean = (1.0 + 4.5 / 3 + 2.0) / 3
    std = math.sqrt(sum(w * (r - mean) ** 2 for r, w in zip(rewards, weights, strict=True)) / 2)
    made = group_relative(
        torch.tensor(rewards, dtype=torch.float64),
        torch.zeros(6, dtype=torch.int64),
        torch.tensor(weights, dtype=torch.float64),
    )
    assert made.tolist() == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-12)


def test_branches_of_a_lone_session_have_nothing_to_be_better_than() -> None:
    rewards, third = torch.tensor([0.0, 1.0, 5.0]), torch.full((3,), 1 / 3)
    assert group_relative(rewards, torch.zeros(3, dtype=torch.int64), third).tolist() == [0.0] * 3


def test_the_figures_of_a_batch_count_sessions() -> None:
    assert reward_spread([0.0, 1.0, 1.0, 1.0], [1.0, 1 / 3, 1 / 3, 1 / 3]) == pytest.approx(
        (0.5, 0.5)
    )
    rewards = [0.3, 1.7, -2.0, 0.25]
    assert reward_spread(rewards, [1.0] * 4) == pytest.approx(
        (statistics.fmean(rewards), statistics.pstdev(rewards))
    )
    assert reward_spread([], []) == (0.0, 0.0)


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
        policy,
        proximal,
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
    )
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert marks.item() == clipped


def test_a_clipped_token_has_no_gradient_and_a_fresh_one_has_minus_its_advantage() -> None:
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    proximal = torch.tensor([-2.0, -1.0])
    losses, _ = clipped_surrogate(
        policy, proximal, torch.tensor([1.0, 3.0]), clip_low=0.2, clip_high=0.2
    )
    losses.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, -3.0]


def test_the_behavior_correction_is_capped_detached_and_off_by_default() -> None:
    proximal, behavior = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -4.0])
    weights = truncated_importance(proximal.requires_grad_(), behavior, cap=2.0)
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0], rel=1e-6)
    assert not weights.requires_grad
    tokens = TokenBatch(proximal, proximal.detach(), behavior, torch.tensor([1.0, 1.0]))
    assert build_algorithm(AlgorithmConfig()).loss(tokens).loss_sum.item() == pytest.approx(-2.0)
    for cap in (0.5, 1.0, 2.0):
        capped = build_algorithm(AlgorithmConfig(behavior_cap=cap)).loss(tokens)
        expected = -min(math.exp(0.5), cap) - cap
        assert capped.loss_sum.item() == pytest.approx(expected, rel=1e-6)
