"""Who chooses the arm of a round. Owns the protocols and the grouping by batch size, no rule of choice."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from rollout_gateway.engines.base import ArmReport


class BanditSettings(BaseModel):
    """Which bandit and how it remembers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = "epsilon_greedy"
    epsilon: float = Field(default=0.1, ge=0.0, le=1.0)  # share of rounds that explore
    window: int = Field(default=1000, ge=1)  # rounds remembered per group, of all arms together
    groups: tuple[int, ...] = (1, 2, 5, 21)  # smallest batch size of each group
    watchdog_rounds: int = Field(default=20, ge=0)  # without acceptance, then a drafter is dead; 0: never


@dataclass(frozen=True, slots=True)
class Choice:
    """An arm, and whether it was taken to learn about it."""

    arm: str
    explored: bool


class Bandit(Protocol):
    """Chooses an arm per round, separately in each batch-size group; the reward is tokens per second."""

    def choose(self, batch_size: int) -> Choice:
        """The arm of the next round."""
        ...

    def observe(
        self, arm: str, batch_size: int, tokens: int, seconds: float, accept_length: float, *, explored: bool
    ) -> None:
        """What a round gave: tokens of all rows, seconds of draft and verification, mean tokens per row."""
        ...

    def forget(self, arms: Set[str]) -> None:
        """These arms have changed (a new drafter): what was learned of them holds no longer."""
        ...

    def reports(self) -> Sequence[ArmReport]:
        """Statistics of every arm and group that was pulled."""
        ...


class SelectiveBandit(Bandit, Protocol):
    """A bandit that may be held to some of its arms; every kind in the table is one."""

    def choose_among(self, batch_size: int, names: Sequence[str]) -> Choice:
        """The arm of the next round, one of `names`: at least one, in the order of all arms."""
        ...


def speculator_of(arm: str) -> str:
    """The drafter of `<speculator>:...`; empty for an arm that drafts nothing."""
    speculator, colon, _ = arm.partition(":")
    return speculator if colon else ""


def group_of(groups: Sequence[int], batch_size: int) -> int:
    """Smallest batch size of the group that holds batch_size; groups ascend."""
    return groups[max(bisect_right(groups, batch_size) - 1, 0)]
