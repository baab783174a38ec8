"""What a bandit remembers: the last rounds of each batch-size group, and who holds them.

Owns no rule of choice.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from paceline.trajectory import Target
from rollout_gateway.bandits.base import (
    ArmChoice,
    BanditSettings,
    CostSample,
    RoundOutcome,
    Situation,
    group_of,
)
from rollout_gateway.bandits.evidence import ArmReport, Evidence


class PlayedRound(NamedTuple):
    """What one round gave."""

    arm: str
    tokens: int
    seconds: float
    accept_length: float

    @property
    def rate(self) -> float:
        """Tokens per second; 0 for a round that took no time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class ArmWindow:
    """Sums over the rounds of one arm that the window holds, and counts since the start."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rates: float = 0.0  # of each round, summed
    accepted: float = 0.0
    pulls: int = 0
    explorations: int = 0

    def add(self, one: PlayedRound, sign: int) -> None:
        """Count a round in (1) or out (-1)."""
        self.rounds += sign
        self.tokens += sign * one.tokens
        self.seconds += sign * one.seconds
        self.rates += sign * one.rate
        self.accepted += sign * one.accept_length

    @property
    def rate(self) -> float:
        """Tokens per second over the window: of all its rounds as one."""
        return self.tokens / self.seconds if self.rounds and self.seconds > 0 else 0.0

    @property
    def mean_rate(self) -> float:
        """Mean over the window of each round's tokens per second."""
        return self.rates / self.rounds if self.rounds else 0.0


class GroupWindow:
    """The last `window` rounds of one batch-size group, whichever arms they used.

    The window spans the rounds of all arms together, so that what was learned of an arm long ago
    leaves it even when the arm is hardly used, and the arm is tried again. A kind that needs more
    than sums overrides `add` and `forget`.
    """

    def __init__(self, names: Sequence[str], window: int) -> None:
        self.arms = {name: ArmWindow() for name in names}
        self.rounds: deque[PlayedRound] = deque()
        self._window = window

    def add(self, one: PlayedRound) -> PlayedRound | None:
        """Remember a round; the one that left the window for it."""
        self.rounds.append(one)
        self.arms[one.arm].add(one, 1)
        if len(self.rounds) <= self._window:
            return None
        old = self.rounds.popleft()
        self.arms[old.arm].add(old, -1)
        return old

    def forget(self, names: Set[str]) -> None:
        """Drop the rounds of these arms."""
        for one in self.rounds:
            if one.arm in names:
                self.arms[one.arm].add(one, -1)
        self.rounds = deque(one for one in self.rounds if one.arm not in names)


G = TypeVar("G", bound=GroupWindow)


class WindowedBandit(ABC, Generic[G]):
    """A bandit whose memory is a GroupWindow per batch-size group; a kind adds the rule of
    choice.
    """

    def __init__(
        self,
        settings: BanditSettings,
        arms: Sequence[str],
        seed: int,
        group: Callable[[Sequence[str], int], G],
    ) -> None:
        self._settings = settings
        self._names = tuple(arms)
        self._groups = {smallest: group(arms, settings.window) for smallest in settings.groups}
        self._random = random.Random(seed)

    @abstractmethod
    def choose_among(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        """The arm of the next round, one of `names`."""

    def choose(self, situation: Situation) -> ArmChoice:
        """The arm of the next round."""
        return self.choose_among(situation, self._names)

    def prime(self, costs: Sequence[CostSample]) -> None:
        """Nothing: these kinds know tokens per second alone."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Remember a round."""
        group = self._group(outcome.situation.batch_size)
        group.add(PlayedRound(outcome.arm, outcome.tokens, outcome.seconds, outcome.accept_length))
        group.arms[outcome.arm].pulls += 1
        group.arms[outcome.arm].explorations += outcome.explored

    def forget(self, arms: Set[str], changed: Target) -> None:
        """A new drafter: its arms are tried again.

        A new policy moves all arms a little; the window follows.
        """
        if changed is Target.DRAFTER:
            for group in self._groups.values():
                group.forget(arms)

    def snapshot(self) -> Evidence:
        """Nothing: seconds of one engine's rounds say little of another's."""
        return Evidence()

    def merge(self, evidence: Evidence) -> None:
        """Nothing, as `snapshot`."""

    def reports(self) -> list[ArmReport]:
        """Statistics of every arm and group that was pulled."""
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

    def _group(self, batch_size: int) -> G:
        return self._groups[group_of(self._settings.groups, batch_size)]
