"""The bandits' memory: a window of rounds per batch-size group.

The rules of choice are in the modules of each kind.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.arm_names import read_arm
from paceline.services.rollout_gateway.bandits.base import (
    ArmChoice,
    ArmReport,
    BanditSettings,
    RoundOutcome,
    Situation,
    group_of,
)
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target

BOUND_Z = 2.0  # standard errors added to a rate for its upper bound


class PlayedRound(NamedTuple):
    """Result of one round."""

    arm: str
    tokens: float
    seconds: float
    accept_length: float
    rate: float

    def scaled(self, gain: float) -> PlayedRound:
        """This round with `gain` times its tokens in the same seconds."""
        tokens, length = self.tokens * gain, self.accept_length * gain
        return PlayedRound(self.arm, tokens, self.seconds, length, self.rate * gain)


@dataclass(slots=True)
class ArmWindow:
    """Rounds of one arm in the window, and counts since the start."""

    rates: deque[float] = field(default_factory=deque)  # of each round, oldest first
    tokens: float = 0.0
    seconds: float = 0.0
    accepted: float = 0.0
    squares: float = 0.0  # of the rates
    pulls: int = 0
    explorations: int = 0

    def add(self, one: PlayedRound) -> None:
        """Adds a round."""
        self.rates.append(one.rate)
        self._count(one, 1)

    def drop(self, one: PlayedRound) -> None:
        """Removes the oldest round."""
        self.rates.popleft()
        self._count(one, -1)

    def clear(self) -> None:
        """Removes all rounds; counts since the start stay."""
        self.rates.clear()
        self.tokens = self.seconds = self.accepted = self.squares = 0.0

    def _count(self, one: PlayedRound, sign: int) -> None:
        self.tokens += sign * one.tokens
        self.seconds += sign * one.seconds
        self.accepted += sign * one.accept_length
        self.squares += sign * one.rate * one.rate

    @property
    def rounds(self) -> int:
        """Number of rounds in the window."""
        return len(self.rates)

    @property
    def rate(self) -> float:
        """Tokens per second over the window: all tokens divided by all seconds."""
        return self.tokens / self.seconds if self.rates and self.seconds > 0 else 0.0

    @property
    def rate_at_best(self) -> float:
        """The rate plus BOUND_Z standard errors; infinite without rounds."""
        if not self.rates:
            return math.inf
        mean = sum(self.rates) / self.rounds
        variance = max(self.squares / self.rounds - mean * mean, 0.0)
        spread = math.sqrt(variance / self.rounds) / mean if mean > 0 else 0.0
        return self.rate * (1.0 + BOUND_Z * spread)


class GroupWindow:
    """The last `window` rounds of one batch-size group, over all arms.

    One window for all arms lets old evidence of a rarely used arm expire, so the arm is tried
    again.
    """

    def __init__(self, names: Sequence[str], window: int) -> None:
        self.arms = {name: ArmWindow() for name in names}
        self._rounds: deque[PlayedRound] = deque()
        self._window = window

    def add(self, one: PlayedRound) -> None:
        """Records a round; the oldest one leaves a full window."""
        self._rounds.append(one)
        self.arms[one.arm].add(one)
        if len(self._rounds) > self._window:
            old = self._rounds.popleft()
            self.arms[old.arm].drop(old)

    def renew(self, gains: Mapping[str, float], keep: int) -> None:
        """Scales the newest `keep` rounds of each arm in `gains` by the arm's gain, and makes them
        the newest of the window. Other rounds of these arms are dropped.
        """
        own = [one for one in self._rounds if one.arm in gains]
        self._rounds = deque(one for one in self._rounds if one.arm not in gains)
        left = Counter({name: keep - self.arms[name].rounds for name in gains})
        for name in gains:
            self.arms[name].clear()
        for one in own:
            left[one.arm] += 1
            if left[one.arm] > 0:
                self.add(one.scaled(gains[one.arm]))


def length_gains(arms: Set[str], shift: AcceptanceShift | None) -> dict[str, float]:
    """Ratio of tokens per round with the new drafter, by arm; 1 where it is unknown."""
    names = {arm: read_arm(arm) for arm in arms}
    return {
        arm: shift.length_gain(name.shape.steps) if shift is not None and name is not None else 1.0
        for arm, name in names.items()
    }


class WindowedBandit(ABC):
    """Base of a bandit with a GroupWindow per batch-size group. A subclass adds the rule."""

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        self._settings = settings
        self._names = tuple(arms)
        self._groups = {
            smallest: GroupWindow(arms, settings.window) for smallest in settings.groups
        }
        self._random = random.Random(seed)

    def choose(self, situation: Situation, names: Sequence[str] = ()) -> ArmChoice:
        """Returns the arm of the next round, one of `names`; (): any arm."""
        names = names or self._names
        if len(names) == 1:
            return ArmChoice(names[0], explored=False)
        return self._choose(situation, names)

    @abstractmethod
    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        """Chooses among `names`, which has at least two entries."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Records a round."""
        group = self._group(outcome.situation)
        facts = (outcome.tokens, outcome.seconds, outcome.accept_length, outcome.rate)
        group.add(PlayedRound(outcome.arm, *facts))
        group.arms[outcome.arm].pulls += 1
        group.arms[outcome.arm].explorations += outcome.explored

    def renew(self, arms: Set[str], changed: Target, shift: AcceptanceShift | None = None) -> None:
        """After a new drafter, its arms inherit rounds or are tried again.

        A new policy moves all arms a little, and the window follows.
        """
        if changed is Target.DRAFTER:
            gains = length_gains(arms, shift)
            keep = self._settings.inherited_rounds if shift is not None else 0
            for group in self._groups.values():
                group.renew(gains, keep)

    def reports(self) -> list[ArmReport]:
        """Statistics of every arm and group with at least one pull."""
        return [
            ArmReport(
                name,
                smallest,
                arm.pulls,
                arm.explorations,
                arm.rate,
                arm.accepted / max(arm.rounds, 1),
            )
            for smallest, group in self._groups.items()
            for name, arm in group.arms.items()
            if arm.pulls
        ]

    def _group(self, situation: Situation) -> GroupWindow:
        return self._groups[group_of(self._settings.groups, situation.batch_size)]

    def _nearest(self, situation: Situation) -> list[GroupWindow]:
        """The other groups, nearest batch sizes first."""
        groups = self._settings.groups
        own = groups.index(group_of(groups, situation.batch_size))
        others = sorted(range(len(groups)), key=lambda index: abs(index - own))[1:]
        return [self._groups[groups[index]] for index in others]
