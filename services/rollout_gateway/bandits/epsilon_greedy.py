"""Epsilon-greedy over a sliding window (Sutton and Barto 2018, section 2.4, with a window for a
moving world).
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_gateway.bandits.base import ArmChoice, Situation
from rollout_gateway.bandits.window import WindowedBandit

TRIAL_PULLS = 4
"""Rounds of an arm that a group's window has to hold before the best is exploited; one of them may
be a warm-up.
"""


class EpsilonGreedy(WindowedBandit):
    """Explores with probability epsilon, else takes the arm of the highest rate in the batch's
    group.
    """

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        arms = self._group(situation).arms
        least = min(names, key=lambda name: arms[name].rounds)
        if arms[least].rounds < TRIAL_PULLS:
            return ArmChoice(least, explored=True)
        if self._random.random() < self._settings.epsilon:
            return ArmChoice(self._random.choice(names), explored=True)
        return ArmChoice(max(names, key=lambda name: arms[name].rate), explored=False)
