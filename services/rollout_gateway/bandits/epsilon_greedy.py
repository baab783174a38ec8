"""Epsilon-greedy over a sliding window (Sutton and Barto 2018, section 2.4, with a window for a moving world)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from rollout_gateway.bandits.base import BanditSettings, Choice, group_of
from rollout_gateway.engines.base import ArmReport

TRIAL_PULLS = 4
"""Rounds of an arm that a group's window has to hold before the best is exploited; one of them may be a warm-up."""


class _Round(NamedTuple):
    arm: str
    tokens: int
    seconds: float
    accept_length: float


@dataclass(slots=True)
class _Arm:
    """Sums over the rounds of one arm that the window holds, and counts since the start."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accepted: float = 0.0
    pulls: int = 0
    explorations: int = 0

    def add(self, one: _Round, sign: int) -> None:
        self.rounds += sign
        self.tokens += sign * one.tokens
        self.seconds += sign * one.seconds
        self.accepted += sign * one.accept_length

    @property
    def rate(self) -> float:
        """Tokens per second over the window."""
        return self.tokens / self.seconds if self.rounds and self.seconds > 0 else 0.0


class _Group:
    """The last `window` rounds of one batch-size group, whichever arms they used."""

    def __init__(self, names: Sequence[str], window: int) -> None:
        self.arms = {name: _Arm() for name in names}
        self._rounds: deque[_Round] = deque()
        self._window = window

    def add(self, one: _Round) -> None:
        self._rounds.append(one)
        self.arms[one.arm].add(one, 1)
        if len(self._rounds) > self._window:
            old = self._rounds.popleft()
            self.arms[old.arm].add(old, -1)

    def forget(self, names: Set[str]) -> None:
        for one in self._rounds:
            if one.arm in names:
                self.arms[one.arm].add(one, -1)
        self._rounds = deque(one for one in self._rounds if one.arm not in names)


class EpsilonGreedy:
    """Explores with probability epsilon, else takes the arm of the highest rate in the batch's group.

    The window spans the rounds of all arms together, so that what was learned of an arm long ago leaves it even when
    the arm is hardly used, and the arm is tried again.
    """

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        self._settings = settings
        self._names = tuple(arms)
        self._groups = {group: _Group(arms, settings.window) for group in settings.groups}
        self._random = random.Random(seed)

    def choose(self, batch_size: int) -> Choice:
        """The arm of the next round."""
        arms = self._groups[group_of(self._settings.groups, batch_size)].arms
        if len(self._names) == 1:
            return Choice(self._names[0], explored=False)
        least = min(self._names, key=lambda name: arms[name].rounds)
        if arms[least].rounds < TRIAL_PULLS:
            return Choice(least, explored=True)
        if self._random.random() < self._settings.epsilon:
            return Choice(self._random.choice(self._names), explored=True)
        return Choice(max(self._names, key=lambda name: arms[name].rate), explored=False)

    def observe(
        self, arm: str, batch_size: int, tokens: int, seconds: float, accept_length: float, *, explored: bool
    ) -> None:
        """Remember a round."""
        group = self._groups[group_of(self._settings.groups, batch_size)]
        group.add(_Round(arm, tokens, seconds, accept_length))
        group.arms[arm].pulls += 1
        group.arms[arm].explorations += explored

    def forget(self, arms: Set[str]) -> None:
        """What was learned of these arms holds no longer; they are tried again."""
        for group in self._groups.values():
            group.forget(arms)

    def reports(self) -> list[ArmReport]:
        """Statistics of every arm and group that was pulled."""
        return [
            ArmReport(name, smallest, arm.pulls, arm.explorations, arm.rate, arm.accepted / max(arm.rounds, 1))
            for smallest, group in self._groups.items()
            for name, arm in group.arms.items()
            if arm.pulls
        ]
