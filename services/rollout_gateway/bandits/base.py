"""Who chooses the arm of a round.

Owns the protocols and the grouping by batch size, no rule of choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pydantic import Field

from paceline.config import Config
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target


class BanditConfig(Config):
    """Which bandit chooses the arm of a round, and how it remembers."""

    kind: str = "epsilon_greedy"
    """Bandit algorithm: epsilon_greedy, ucb, beg, or package.module:Class."""
    epsilon: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of rounds that explore, of epsilon_greedy and beg."""
    window: int = Field(default=1000, ge=1)
    """Rounds remembered per group, of all arms together."""
    groups: tuple[int, ...] = (1, 2, 5, 21)
    """Smallest batch size of each group."""
    inherited_rounds: ClassVar[int] = 64
    """Rounds that a new drafter's arms take over from the drafter before it, as its trainer says
    that they change; 0: its arms are tried anew.
    """


class BanditSettings(BanditConfig):
    """With what the engine alone decides."""

    watchdog_rounds: int = Field(default=20, ge=0)
    """Rounds without an accepted draft after which a drafter rests; 0: it never does."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The batch of a decode round."""

    batch_size: int  # requests that decode, at least 1
    context: int  # tokens of the longest request, prompt included


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round gave."""

    arm: str
    situation: Situation
    taken: Sequence[int]  # [B] tokens emitted per request, the bonus token included
    seconds: float  # of draft and verification
    explored: bool  # as the choice said

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.taken)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 for a round that took no time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens per row."""
        return self.tokens / len(self.taken)


@dataclass(frozen=True, slots=True)
class ArmChoice:
    """An arm, and whether it was taken to learn about it."""

    arm: str
    explored: bool


@dataclass(frozen=True, slots=True)
class ArmReport:
    """Statistics of one arm in one batch-size group."""

    arm: str
    batch_group: int
    pulls: int
    explorations: int
    mean_tokens_per_s: float
    mean_accept_length: float
    drafter_deaths: int = 0  # times that the watchdog retired its drafter in this group


class Bandit(Protocol):
    """Chooses an arm per round, separately in each batch-size group."""

    def choose(self, situation: Situation, names: Sequence[str] = ()) -> ArmChoice:
        """The arm of the next round, one of `names` in the order of all arms; (): of all."""
        ...

    def observe(self, outcome: RoundOutcome) -> None:
        """What a round gave."""
        ...

    def renew(self, arms: Set[str], changed: Target, shift: AcceptanceShift | None = None) -> None:
        """These arms draft with, or for, new weights; seconds stay as known.

        changed: DRAFTER (the arms of the new drafter) or POLICY (the target of all arms). shift:
        how much more of the new drafter is accepted than of the one before, whose rounds then say
        what to expect, as much as `inherited_rounds`; None: nothing is known of the new one.
        """
        ...

    def reports(self) -> Sequence[ArmReport]:
        """Statistics of every arm and group that was pulled."""
        ...


def group_of(groups: Sequence[int], batch_size: int) -> int:
    """Smallest batch size of the group that holds batch_size; groups ascend."""
    return groups[max(bisect_right(groups, batch_size) - 1, 0)]
