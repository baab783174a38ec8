"""Who chooses the arm of a round.

Owns the protocols and the grouping by batch size, no rule of choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import Field

from paceline.config import Config
from paceline.services.rollout_gateway.bandits.evidence import ArmReport, Evidence
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target


class BanditConfig(Config):
    """Which bandit chooses the arm of a round, and how it remembers."""

    kind: str = "epsilon_greedy"
    """Rule of choice: cost_model, epsilon_greedy, ucb, thompson, beg, or package.module:Class."""
    epsilon: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of rounds that explore, of epsilon_greedy and beg."""
    window: int = Field(default=1000, ge=1)
    """Rounds remembered per group, of all arms together."""
    groups: tuple[int, ...] = (1, 2, 5, 21)
    """Smallest batch size of each group."""
    inherited_rounds: int = Field(default=64, ge=0)
    """Rounds that a new drafter's arms take over from the drafter before it, as its trainer says
    that they change; 0: its arms are tried anew.
    """


class BanditSettings(BanditConfig):
    """With what the engine alone decides."""

    watchdog_rounds: int = Field(default=20, ge=0)
    """Rounds without an accepted draft after which a drafter rests; 0: it never does."""
    share_positions: bool = True
    """Of cost_model: chains of one drafter are one chain, cut at different lengths."""


class RowFacts(NamedTuple):
    """A request that decodes."""

    request_id: int
    generated: int  # response tokens so far
    limit: int  # response tokens at most


@dataclass(frozen=True, slots=True)
class Situation:
    """What a round begins with."""

    rows: Sequence[RowFacts]  # one per request of the batch, at least one
    context: int  # known tokens of the longest row, prompt included
    draining: bool  # nothing waits: the batch only shrinks

    @property
    def batch_size(self) -> int:
        """Rows of the round."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round gave."""

    arm: str
    situation: Situation
    # tokens emitted per row, the bonus token included; in the order of situation.rows
    taken: Sequence[int]
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
class UnusedDrafts:
    """What an arm would have given for some rows of rounds that another arm drafted."""

    arm: str
    situation: Situation  # of the last round
    rows: Sequence[int]  # indices of situation.rows
    taken: Sequence[int]  # tokens of each, as RoundOutcome.taken
    more: Sequence[bool]  # whether each would have gone on


class CostSample(NamedTuple):
    """A round that was timed before any request came."""

    arm: str
    batch_size: int
    context: int  # tokens of the longest row
    seconds: float


@dataclass(frozen=True, slots=True)
class ArmChoice:
    """An arm, and whether it was taken to learn about it."""

    arm: str
    explored: bool
    # of a token of each of the situation's rows, in any unit; (): all alike
    worth: Sequence[float] = ()


class Bandit(Protocol):
    """Chooses an arm per round, separately in each batch-size group."""

    def prime(self, costs: Sequence[CostSample]) -> None:
        """Seconds that rounds took at the engine's start; a kind that learns of rounds alone
        ignores them.
        """
        ...

    def choose(self, situation: Situation, names: Sequence[str] = ()) -> ArmChoice:
        """The arm of the next round, one of `names` in the order of all arms; (): of all."""
        ...

    def observe(self, outcome: RoundOutcome) -> None:
        """What a round gave."""
        ...

    def observe_unused(self, drafts: UnusedDrafts) -> None:
        """What an arm would have given; after `observe` of the round that decided it. A kind that
        learns of whole rounds ignores it.
        """
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

    def snapshot(self) -> Evidence:
        """What this bandit's own rounds have shown, for other engines; empty for a kind that does
        not share.
        """
        ...

    def merge(self, evidence: Evidence) -> None:
        """What the rounds of all other engines have shown; takes the place of what was merged
        before.
        """
        ...


def group_of(groups: Sequence[int], batch_size: int) -> int:
    """Smallest batch size of the group that holds batch_size; groups ascend."""
    return groups[max(bisect_right(groups, batch_size) - 1, 0)]
