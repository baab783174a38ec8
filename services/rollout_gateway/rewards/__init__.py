"""Reward rules: one file each, named in the table of rules.py."""

from __future__ import annotations

from paceline.errors import NotFound
from rollout_gateway.rewards.base import RewardRule, Unscored
from rollout_gateway.rewards.format import FormatRule
from rollout_gateway.rewards.math_answer import MathAnswer
from rollout_gateway.rewards.rules import REWARDS, RewardRules

_QUICK = {"math_answer": MathAnswer, "format": FormatRule}


def reward_rule(name: str, marker: str) -> RewardRule:
    """A rule that needs no child process, without mathematics. Raises NotFound."""
    if name not in _QUICK:
        raise NotFound("no such reward rule", seen=name, allowed=", ".join(sorted(_QUICK)))
    return _QUICK[name](marker)


__all__ = ["REWARDS", "FormatRule", "MathAnswer", "RewardRule", "RewardRules", "Unscored", "reward_rule"]
