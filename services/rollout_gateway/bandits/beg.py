"""Bucketed epsilon-greedy, the tuner of FastRL (Hu et al. 2025, arXiv 2511.16665), as a baseline.

A table maps draft-token counts in descending order to batch-size groups in ascending order. One
request verifies the most tokens and a full batch the least, so there must be as many counts as
groups. Among arms with the same count, epsilon-greedy compares the median rate in the window; an
arm without rounds counts as infinitely fast. With one arm per count, FastRL's default, nothing is
explored.

FastRL cannot switch speculation off between rounds, so `off` belongs to no bucket and is chosen
only when no other arm may be. Rewards are the protocol's tokens per second. FastRL instead uses the
arm's median acceptance length over all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from paceline.arm_names import speculator_of
from paceline.errors import ConfigError
from paceline.services.rollout_gateway.bandits.base import (
    ArmChoice,
    BanditSettings,
    Situation,
    group_of,
)
from paceline.services.rollout_gateway.bandits.window import ArmWindow, WindowedBandit


def draft_tokens_of(arm: str) -> int:
    """Tokens per request that a drafting arm verifies, including the root. Raises ConfigError."""
    count = arm.rpartition("_")[2]
    if not count.isdecimal():
        raise ConfigError(
            "beg needs the draft tokens of each arm",
            seen=arm,
            allowed="<speculator>:..._<draft tokens>",
        )
    return int(count)


def bucket_arms(arms: Sequence[str], groups: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """The arms of each batch-size group; empty tuples when no arm drafts.

    Raises ConfigError when the counts do not match the groups.
    """
    budgets = {arm: draft_tokens_of(arm) for arm in arms if speculator_of(arm)}
    descending = sorted(set(budgets.values()), reverse=True)
    if not descending:
        return dict.fromkeys(groups, ())
    if len(descending) != len(groups):
        raise ConfigError(
            "beg maps each number of draft tokens to one batch-size group",
            seen=f"draft tokens {descending}",
            allowed=f"{len(groups)} numbers, for the groups from {list(groups)} rows on",
        )

    return {
        group: tuple(arm for arm in arms if budgets.get(arm) == budget)
        for group, budget in zip(groups, descending, strict=True)
    }


def median_rate(arm: ArmWindow) -> float:
    """Median tokens per second of the arm's rounds; infinite without rounds."""
    return median(arm.rates) if arm.rates else float("inf")


class BucketedEpsilonGreedy(WindowedBandit):
    """Chooses the table's bucket for the batch size, and epsilon-greedy within it."""

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        super().__init__(settings, arms, seed)
        self._buckets = bucket_arms(arms, settings.groups)

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        bucket = self._bucket(situation.batch_size, names)
        if len(bucket) == 1:
            return ArmChoice(bucket[0], explored=False)
        if self._random.random() < self._settings.epsilon:
            return ArmChoice(self._random.choice(bucket), explored=True)
        arms = self._group(situation).arms
        chosen = max(bucket, key=lambda name: median_rate(arms[name]))
        return ArmChoice(chosen, explored=not arms[chosen].rounds)

    def _bucket(self, batch_size: int, names: Sequence[str]) -> Sequence[str]:
        arms = self._buckets[group_of(self._settings.groups, batch_size)]
        return (
            [arm for arm in arms if arm in names]
            or [name for name in names if not speculator_of(name)]
            or list(names)
        )
