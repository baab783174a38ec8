"""Formulas of policy gradients with plain floats, one token or trajectory at a time: references for
the trainer's vectorised formulas.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def group_relative(
    rewards: Sequence[float], groups: Sequence[int], *, normalize: bool = True
) -> list[float]:
    """GRPO's advantages, for sessions of one branch."""
    made = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(members) < 2 or max(members) == min(members):
            made.append(0.0)
            continue
        scale = statistics.stdev(members) + 1e-6 if normalize else 1.0
        made.append((reward - statistics.fmean(members)) / scale)
    return made


def leave_one_out(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """RLOO's advantages: each reward minus the mean of the group's other rewards."""
    made = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [
            r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i
        ]
        made.append(reward - statistics.fmean(others) if others else 0.0)
    return made


def normalized(values: Sequence[float]) -> list[float]:
    """Values centred and divided by their standard deviation."""
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / (spread + 1e-6) for value in values]


def generalized(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> list[float]:
    """GAE of one trajectory, as the double sum that defines it."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def surrogate(
    ratio: float, advantage: float, low: float, high: float, dual: float = 0.0
) -> tuple[float, bool]:
    """PPO's loss of a token, and whether a bound is active."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    gain = min(ratio * advantage, bounded * advantage)
    held = bounded * advantage < ratio * advantage
    if dual and advantage < 0 and gain < dual * advantage:
        gain, held = dual * advantage, True
    return -gain, held


def value_loss(value: float, old: float, wanted: float, clip: float) -> float:
    """PPO's loss of a value estimate."""
    plain = (value - wanted) ** 2
    if not clip:
        return plain / 2
    near = old + min(max(value - old, -clip), clip)
    return max(plain, (near - wanted) ** 2) / 2


def divergence(policy: float, reference: float, estimator: str) -> float:
    """k1, k2, k3 of Schulman's note, from the ratio itself."""
    ratio = math.exp(reference) / math.exp(policy)
    return {
        "k1": -math.log(ratio),
        "k2": math.log(ratio) ** 2 / 2,
        "k3": ratio - 1 - math.log(ratio),
    }[estimator]


def by_sequence(values: Sequence[float], sequences: Sequence[int]) -> list[list[float]]:
    """For each token, the values of its whole sequence."""
    return [
        [v for v, other in zip(values, sequences, strict=True) if other == own] for own in sequences
    ]
