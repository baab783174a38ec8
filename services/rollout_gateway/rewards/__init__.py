"""Reward rules: one file each, named in the table of rules.py."""

from __future__ import annotations

from paceline.services.rollout_gateway.rewards.base import RewardRule, Unscored
from paceline.services.rollout_gateway.rewards.rules import REWARDS, RewardRules

__all__ = ["REWARDS", "RewardRule", "RewardRules", "Unscored"]
