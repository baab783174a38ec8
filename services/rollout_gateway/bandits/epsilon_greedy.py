"""Epsilon-greedy over a sliding window (Sutton and Barto 2018, section 2.4, with a window for a moving world)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_gateway.bandits.base import BanditSettings, Choice, group_of
from rollout_gateway.engines.base import ArmReport

TRIAL_PULLS = 2
"""Rounds every arm gets in a group before the best is exploited: the first one also pays for warming up."""


@dataclass(slots=True)
class _Arm:
    """Sums over the last `window` rounds of one arm in one group."""

    rounds: deque[tuple[int, float, float]] = field(default_factory=deque)  # tokens, seconds, accept length
    tokens: int = 0
    seconds: float = 0.0
    accepted: float = 0.0
    pulls: int = 0
    explorations: int = 0

    def add(self, window: int, tokens: int, seconds: float, accept_length: float) -> None:
        self.rounds.append((tokens, seconds, accept_length))
        self.tokens, self.seconds, self.accepted = (
            self.tokens + tokens,
            self.seconds + seconds,
            self.accepted + accept_length,
        )
        if len(self.rounds) > window:
            old = self.rounds.popleft()
            self.tokens, self.seconds, self.accepted = (
                self.tokens - old[0],
                self.seconds - old[1],
                self.accepted - old[2],
            )

    @property
    def rate(self) -> float:
        """Tokens per second over the window."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class EpsilonGreedy:
    """Explores with probability epsilon, else takes the arm of the highest rate in the batch's group."""

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        self._settings = settings
        self._names = tuple(arms)
        self._arms = {group: {arm: _Arm() for arm in arms} for group in settings.groups}
        self._random = random.Random(seed)

    def choose(self, batch_size: int) -> Choice:
        """The arm of the next round."""
        arms = self._arms[group_of(self._settings.groups, batch_size)]
        if len(self._names) == 1:
            return Choice(self._names[0], explored=False)
        least = min(self._names, key=lambda name: arms[name].pulls)
        if arms[least].pulls < TRIAL_PULLS:
            return Choice(least, explored=True)
        if self._random.random() < self._settings.epsilon:
            return Choice(self._random.choice(self._names), explored=True)
        return Choice(max(self._names, key=lambda name: arms[name].rate), explored=False)

    def observe(
        self, arm: str, batch_size: int, tokens: int, seconds: float, accept_length: float, *, explored: bool
    ) -> None:
        """Remember a round."""
        state = self._arms[group_of(self._settings.groups, batch_size)][arm]
        state.add(self._settings.window, tokens, seconds, accept_length)
        state.pulls += 1
        state.explorations += explored

    def reports(self) -> list[ArmReport]:
        """Statistics of every arm and group that was pulled."""
        return [
            ArmReport(name, group, arm.pulls, arm.explorations, arm.rate, arm.accepted / len(arm.rounds))
            for group, arms in self._arms.items()
            for name, arm in arms.items()
            if arm.pulls
        ]
