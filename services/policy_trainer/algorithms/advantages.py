"""Computes advantages, as pure functions.

Shape letters: B trajectories of a batch, G groups.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def group_relative(
    rewards: Float[Tensor, " B"],
    groups: Int[Tensor, " B"],
    weights: Float[Tensor, " B"],
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " B"]:
    """A_i = (r_i - mean(r of i's group)) / (std(r of i's group) + eps), GRPO (arXiv 2402.03300,
    section 4.1.2).

    `groups` holds the group number of each trajectory, counted from 0; `weights` what it counts in
    its group: one over the branches of its session, so that the weights of a session sum to 1 and
    those of a group to its n sessions.

        mean = sum(w r) / n        std^2 = sum(w (r - mean)^2) / (n - 1)        n = sum(w)

    n - 1 makes std^2 the unbiased variance over sessions where the branches of one share its
    reward: a session split into more branches changes nothing. (The other usual denominator, n -
    sum(w^2) / n, takes branches for independent attempts, which they are not.) With all weights 1
    it is the sample variance.

    With normalize_std off the division is left out (Dr. GRPO, arXiv 2503.20783). A group whose
    rewards are all equal, and a group of one session, get exactly 0: there is no sibling to be
    better than.
    """
    count = int(groups.max().item()) + 1 if groups.numel() else 0
    sizes = torch.zeros(count, dtype=rewards.dtype).index_add_(0, groups, weights)
    mean = torch.zeros(count, dtype=rewards.dtype).index_add_(0, groups, weights * rewards) / sizes
    alone = sizes < 1.5  # sizes are whole numbers but for the rounding of thirds
    nothing = alone[groups] | _equal_in_group(rewards, groups, count)
    centred = torch.where(nothing, 0.0, rewards - mean[groups])
    if not normalize_std:
        return centred
    squares = torch.zeros(count, dtype=rewards.dtype).index_add_(
        0, groups, weights * centred.square()
    )
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return centred / (std[groups] + eps)


def _equal_in_group(rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"], count: int) -> Tensor:
    """True for members of groups without reward variance; exact, because a rounded mean would leave
    1e-8 noise.
    """
    low = torch.full((count,), torch.inf, dtype=rewards.dtype).scatter_reduce_(
        0, groups, rewards, "amin"
    )
    high = torch.full((count,), -torch.inf, dtype=rewards.dtype).scatter_reduce_(
        0, groups, rewards, "amax"
    )
    return (low == high)[groups]
