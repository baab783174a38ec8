"""Reward rules: one file each, named in the table."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import NotFound
from rollout_gateway.rewards.base import RewardRule
from rollout_gateway.rewards.format import FormatRule
from rollout_gateway.rewards.math_answer import MathAnswer

REWARDS: dict[str, Callable[[str], RewardRule]] = {"math_answer": MathAnswer, "format": FormatRule}


def reward_rule(name: str, marker: str) -> RewardRule:
    """The rule of that name. Raises NotFound."""
    if name not in REWARDS:
        raise NotFound("no such reward rule", seen=name, allowed=", ".join(sorted(REWARDS)))
    return REWARDS[name](marker)


__all__ = ["REWARDS", "FormatRule", "MathAnswer", "RewardRule", "reward_rule"]
