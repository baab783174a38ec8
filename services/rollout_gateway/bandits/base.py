"""The bandit's protocol, its settings, and the grouping by batch size.

The rules of choice are in the other modules.
"""

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pydantic import Field

from paceline.config import Config
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target
from paceline.v1.engine_pb2 import ArmStats


class BanditConfig(Config):
    """The bandit, which chooses the arm of a round."""

    kind: str = "epsilon_greedy"
    """Bandit algorithm: epsilon_greedy, ucb, beg, or package.module:Class."""
    epsilon: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of exploring rounds, for epsilon_greedy and beg."""
    inherited_rounds: ClassVar[int] = 64
    """Number of rounds that a new drafter's arms inherit from the former drafter, with the
    trainer's prediction of the change; 0: none.
    """


class BanditSettings(BanditConfig):
    """Settings of the bandit, and values that no user sets."""

    window: int = Field(default=1000, ge=1)
    """Number of remembered rounds per group, of all arms together."""
    groups: tuple[int, ...] = (1, 2, 5, 21)
    """Smallest batch size of each group."""
    watchdog_rounds: int = Field(default=20, ge=0)
    """Rounds without an accepted draft before a drafter rests; 0 turns the watchdog off."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The batch of one decode round."""

    batch_size: int  # running requests, at least 1
    context: int  # tokens of the longest request, including its prompt


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """Result of one round."""

    arm: str
    situation: Situation
    taken: Sequence[int]  # [B] tokens emitted per request, including the bonus token
    seconds: float  # of drafting and verification
    explored: bool  # copied from the choice

    @property
    def tokens(self) -> int:
        """Tokens emitted for all requests."""
        return sum(self.taken)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 for a round that took no time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens emitted per request."""
        return self.tokens / len(self.taken)


@dataclass(frozen=True, slots=True)
class ArmChoice:
    """A chosen arm. `explored` is true if the choice was made to learn about the arm."""

    arm: str
    explored: bool


class Bandit(Protocol):
    """Chooses an arm per round, separately in each batch-size group."""

    def choose(self, situation: Situation, names: Sequence[str] = ()) -> ArmChoice:
        """Returns the arm of the next round, one of `names` in the order of all arms; (): any."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Records the result of a round."""

    def renew(self, arms: Set[str], changed: Target, shift: AcceptanceShift | None = None) -> None:
        """Adapts to new weights of these arms' drafter or of their target. Measured seconds stay.

        `changed`: DRAFTER (the new drafter's arms) or POLICY (all arms). `shift`: the change in
        acceptance from the previous drafter to the new one. With a shift, the previous rounds
        predict the new arms, weighted as `inherited_rounds`. None: nothing is measured about the
        new drafter.
        """

    def learn(self, reports: Sequence[ArmStats]) -> None:
        """Uses the statistics of other workers' bandits for arms that it has not tried."""

    def reports(self) -> Sequence[ArmStats]:
        """Statistics of every arm and group with at least one pull."""


def group_of(groups: Sequence[int], batch_size: int) -> int:
    """Smallest batch size of the group that contains batch_size; `groups` ascend."""
    return groups[max(bisect_right(groups, batch_size) - 1, 0)]
