"""Epsilon-greedy over a sliding window (Sutton and Barto 2018, section 2.4, with a window for a
moving world).
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_gateway.bandits.base import ArmChoice, BanditSettings, Situation
from rollout_gateway.bandits.window import GroupWindow, WindowedBandit

TRIAL_PULLS = 4
"""Rounds of an arm that a group's window has to hold before the best is exploited; one of them may
be a warm-up.
"""


class EpsilonGreedy(WindowedBandit[GroupWindow]):
    """Explores with probability epsilon, else takes the arm of the highest rate in the batch's
    group.
    """

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        super().__init__(settings, arms, seed, GroupWindow)

    def choose_among(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        """The arm of the next round, one of `names`."""
        arms = self._group(situation.batch_size).arms
        if len(names) == 1:
            return ArmChoice(names[0], explored=False)
        least = min(names, key=lambda name: arms[name].rounds)
        if arms[least].rounds < TRIAL_PULLS:
            return ArmChoice(least, explored=True)
        if self._random.random() < self._settings.epsilon:
            return ArmChoice(self._random.choice(names), explored=True)
        return ArmChoice(max(names, key=lambda name: arms[name].rate), explored=False)
