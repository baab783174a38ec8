"""Computes advantages, as pure functions.

Shape letters: B trajectories of a batch, G groups, T trained tokens.

`groups` holds the group number of each trajectory, counted from 0. `weights` holds its weight in
the group: one over the number of branches of its session. The weights of a session sum to 1, and
the weights of a group to its n sessions. Splitting a session into more branches with its reward
therefore changes nothing.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.trajectory import ALIKE

EPS = 1e-6
"""Added to a standard deviation before division."""


def group_relative(
    rewards: Float[Tensor, " B"],
    groups: Int[Tensor, " B"],
    weights: Float[Tensor, " B"],
    *,
    normalize_std: bool = True,
) -> Float[Tensor, " B"]:
    """A_i = (r_i - mean(r of i's group)) / (std(r of i's group) + EPS), GRPO (arXiv 2402.03300,
    section 4.1.2).

        mean = sum(w r) / n        std^2 = sum(w (r - mean)^2) / (n - 1)        n = sum(w)

    n - 1 makes std^2 the unbiased variance over sessions if the branches of a session share its
    reward. (The other usual denominator, n - sum(w^2) / n, treats branches as independent
    attempts.) With all weights 1 it is the sample variance.

    With `normalize_std` off there is no division (Dr. GRPO, arXiv 2503.20783). A group of equal
    rewards, or of one session, gets exactly 0, since no sibling is better or worse.
    """
    sizes = _sums(weights, groups)
    mean = _sums(weights * rewards, groups) / sizes
    centred = torch.where(without_variance(rewards, groups), 0.0, rewards - mean[groups])
    alone = sizes < 1.5  # sizes are whole numbers up to the rounding of thirds
    centred = torch.where(alone[groups], 0.0, centred)
    if not normalize_std:
        return centred
    squares = _sums(weights * centred.square(), groups)
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return centred / (std[groups] + EPS)


def leave_one_out(
    rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"], weights: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """A_i = r_i - mean(r of the other sessions of i's group), RLOO (arXiv 2402.14740, eq. 7).

    All branches of a session are left out of its mean, so only siblings are compared: A_i = n / (n
    - 1) (r_i - mean) if its branches share a reward. As in group_relative, a group of equal rewards
    or of one session gets 0.
    """
    sizes = _sums(weights, groups)
    centred = group_relative(rewards, groups, weights, normalize_std=False)
    return centred * (sizes / (sizes - 1).clamp(min=1))[groups]


def without_variance(rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"]) -> Tensor:  # bool [B]
    """True for members of groups with equal rewards, up to rounding (ALIKE)."""
    count = _count(groups)
    low = torch.full((count,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    low = low.scatter_reduce_(0, groups, rewards, "amin")
    high = torch.full_like(low, -torch.inf).scatter_reduce_(0, groups, rewards, "amax")
    size = torch.maximum(low.abs(), high.abs())
    return (size.isfinite() & (high - low <= ALIKE * size))[groups]


def normalized(advantages: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """(A - mean) / (std + EPS) over all tokens of the batch, REINFORCE++ (arXiv 2501.03262, section
    3.2). Zeros if there is nothing to compare.
    """
    if advantages.numel() < 2:
        return torch.zeros_like(advantages)
    centred = advantages - advantages.mean()
    spread = centred.square().sum().div(advantages.numel() - 1).sqrt()
    if spread <= ALIKE * advantages.abs().max():
        return torch.zeros_like(advantages)
    return centred / (spread + EPS)


def returns_to_go(rewards: Float[Tensor, " T"], owners: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Sum of the rewards from each token to the last of its trajectory."""
    return _reversed_scan(rewards, owners, 1.0)


def generalized_advantages(
    rewards: Float[Tensor, " T"],
    values: Float[Tensor, " T"],
    owners: Int[Tensor, " T"],
    *,
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, " T"]:
    """A_t = sum_l (gamma lambda)^l delta_{t+l},  delta_t = r_t + gamma V_{t+1} - V_t: generalised
    advantage estimation (arXiv 1506.02438, eq. 16), over the trained tokens of each trajectory. The
    value after the last token is 0.
    """
    last = _lasts(owners)
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    deltas = rewards + gamma * torch.where(last, 0.0, following) - values
    return _reversed_scan(deltas, owners, gamma * gae_lambda)


def at_last_tokens(amounts: Float[Tensor, " B"], owners: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """The amount of each trajectory at its last trained token, 0 at the other tokens."""
    return torch.where(_lasts(owners), amounts[owners], 0.0)


def _lasts(owners: Int[Tensor, " T"]) -> Tensor:
    after = torch.cat([owners[1:], owners.new_full((1,), -1)])[: len(owners)]
    return owners != after


def _reversed_scan(
    amounts: Float[Tensor, " T"], owners: Int[Tensor, " T"], factor: float
) -> Float[Tensor, " T"]:
    """x_t = amount_t + factor x_{t+1} within each trajectory. All trajectories are computed at
    once, aligned at their ends.
    """
    if not len(owners):
        return amounts
    _, rows, lengths = torch.unique_consecutive(owners, return_inverse=True, return_counts=True)
    ends = lengths.cumsum(0)
    columns = ends[rows] - 1 - torch.arange(len(owners), device=owners.device)  # from the end
    table = amounts.new_zeros(int(lengths.max()), len(lengths))
    table[columns, rows] = amounts
    running = torch.zeros_like(table[0])
    for column in table:
        running = column.copy_(column + factor * running)
    return table[columns, rows]


def _count(groups: Int[Tensor, " B"]) -> int:
    return int(groups.max().item()) + 1 if groups.numel() else 0


def _sums(amounts: Float[Tensor, " B"], groups: Int[Tensor, " B"]) -> Float[Tensor, " G"]:
    sums = torch.zeros(_count(groups), dtype=amounts.dtype, device=amounts.device)
    return sums.index_add_(0, groups, amounts)
