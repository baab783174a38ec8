"""Advantages against plain floats, and against changes that must not affect them."""

from __future__ import annotations

import math

import policy_by_hand as by_hand
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.services.policy_trainer.algorithms.advantages import (
    at_last_tokens,
    generalized_advantages,
    group_relative,
    leave_one_out,
    normalized,
    returns_to_go,
)
from paceline.services.policy_trainer.batches.batcher import reward_spread

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.0, 2.0, 5.0, 7.0]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def in_float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("normalize", [True, False])
def test_group_relative_advantages_are_the_formula(normalize: bool) -> None:
    rewards = in_float64(REWARDS)
    made = group_relative(
        rewards, torch.tensor(GROUPS), torch.ones_like(rewards), normalize_std=normalize
    )
    expected = by_hand.group_relative(REWARDS, GROUPS, normalize=normalize)
    assert made.tolist() == pytest.approx(expected, rel=1e-12)


def test_each_session_is_compared_with_the_mean_of_the_others() -> None:
    rewards = in_float64(REWARDS)
    made = leave_one_out(rewards, torch.tensor(GROUPS), torch.ones_like(rewards))
    expected = by_hand.leave_one_out(REWARDS, GROUPS)
    assert made.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_groups_without_variance_or_siblings_have_advantage_exactly_zero() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 7.0])
    groups, ones = torch.tensor([0, 0, 0, 1]), torch.ones(4)
    assert group_relative(rewards, groups, ones).tolist() == [0.0] * 4
    assert leave_one_out(rewards, groups, ones).tolist() == [0.0] * 4
    nothing = torch.zeros(0)
    assert group_relative(nothing, torch.zeros(0, dtype=torch.int64), nothing).shape == (0,)


@pytest.mark.parametrize("spread", [1e-7, 5e-7])
def test_rewards_that_differ_by_rounding_alone_are_equal(spread: float) -> None:
    rewards = torch.tensor([0.3, 0.3 * (1 + spread), 0.3])
    made = group_relative(rewards, torch.zeros(3, dtype=torch.int64), torch.ones(3))
    assert made.tolist() == [0.0] * 3


@settings(max_examples=100)
@given(
    sessions=st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 7)), min_size=1, max_size=8),
    how=st.sampled_from(["std", "centred", "others"]),
)
def test_splitting_a_session_into_branches_of_its_reward_changes_no_advantage(
    sessions: list[tuple[int, int]], how: str
) -> None:
    def advantages(rewards: list[float], weights: list[float]) -> list[float]:
        groups = torch.zeros(len(rewards), dtype=torch.int64)
        given_ = (torch.tensor(rewards), groups, torch.tensor(weights))
        if how == "others":
            return leave_one_out(*given_).tolist()
        return group_relative(*given_, normalize_std=how == "std").tolist()

    whole = advantages([float(reward) for reward, _ in sessions], [1.0] * len(sessions))
    branches = [(float(reward), 1 / count) for reward, count in sessions for _ in range(count)]
    made = advantages([reward for reward, _ in branches], [weight for _, weight in branches])
    expected = [a for a, (_, count) in zip(whole, sessions, strict=True) for _ in range(count)]
    assert made == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_branches_with_rewards_of_their_own_are_weighed_by_the_formula() -> None:
    # Session x: one branch, reward 1. Session y: three branches, rewards 0, 0.5, 4. Session z: two,
    # rewards 2, 2.
    rewards, weights = [1.0, 0.0, 0.5, 4.0, 2.0, 2.0], [1.0, 1 / 3, 1 / 3, 1 / 3, 0.5, 0.5]
    mean = (1.0 + 4.5 / 3 + 2.0) / 3
    std = math.sqrt(sum(w * (r - mean) ** 2 for r, w in zip(rewards, weights, strict=True)) / 2)
    made = group_relative(
        in_float64(rewards), torch.zeros(6, dtype=torch.int64), in_float64(weights)
    )
    assert made.tolist() == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-12)


def test_branches_of_a_lone_session_have_nothing_to_be_better_than() -> None:
    rewards, third = torch.tensor([0.0, 1.0, 5.0]), torch.full((3,), 1 / 3)
    assert group_relative(rewards, torch.zeros(3, dtype=torch.int64), third).tolist() == [0.0] * 3


def test_the_figures_of_a_batch_count_sessions() -> None:
    assert reward_spread([0.0, 1.0, 1.0, 1.0], [1.0, 1 / 3, 1 / 3, 1 / 3]) == pytest.approx(
        (0.5, 0.5)
    )
    assert reward_spread([], []) == (0.0, 0.0)


TRAJECTORIES = st.lists(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=7), max_size=5
)


@settings(max_examples=100)
@given(TRAJECTORIES, st.floats(0.1, 1), st.floats(0, 1))
def test_generalised_advantages_are_the_double_sum_of_each_trajectory(
    trajectories: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    owners = [2 * i for i, one in enumerate(trajectories) for _ in one]  # some have no tokens
    rewards = [reward for one in trajectories for reward, _ in one]
    values = [value for one in trajectories for _, value in one]
    made = generalized_advantages(
        in_float64(rewards),
        in_float64(values),
        torch.tensor(owners, dtype=torch.int64),
        gamma=gamma,
        gae_lambda=lam,
    )
    expected = [
        advantage
        for one in trajectories
        for advantage in by_hand.generalized([r for r, _ in one], [v for _, v in one], gamma, lam)
    ]
    assert made.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_reward_comes_with_the_last_token_and_returns_add_up_from_each_on() -> None:
    owners = torch.tensor([0, 0, 0, 2, 2])
    earned = at_last_tokens(torch.tensor([5.0, 9.0, 7.0]), owners)
    assert earned.tolist() == [0.0, 0.0, 5.0, 0.0, 7.0]
    penalties = torch.tensor([1.0, 2.0, 4.0, 0.5, 0.25])
    assert returns_to_go(earned - penalties, owners).tolist() == [-2.0, -1.0, 1.0, 6.25, 6.75]


def test_advantages_are_normalised_over_the_tokens_of_the_batch() -> None:
    values = [0.5, -1.0, 3.0, 3.0]
    assert normalized(in_float64(values)).tolist() == pytest.approx(
        by_hand.normalized(values), rel=1e-12
    )
    assert normalized(torch.tensor([0.7])).tolist() == [0.0]
    assert normalized(torch.full((3,), 0.1)).tolist() == [0.0] * 3
