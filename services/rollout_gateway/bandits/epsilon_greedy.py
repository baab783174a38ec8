"""Epsilon-greedy over a sliding window (Sutton and Barto 2018, section 2.4, with a window for a
moving world).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.services.rollout_gateway.bandits.base import ArmChoice, Situation
from paceline.services.rollout_gateway.bandits.window import WindowedBandit

TRIAL_PULLS = 4
"""Rounds of an arm that a group's window has to hold before the best is exploited; one of them may
be a warm-up.
"""
HOPELESS = 0.5
"""Of the best rate in the nearest group that knows an arm: below it the arm is not tried here."""


class EpsilonGreedy(WindowedBandit):
    """Explores with probability epsilon, else takes the arm of the highest rate in the batch's
    group. It explores arms that may be the best for all it knows, here or in a group of batches of
    about that size: a round of another one could change no decision.
    """

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        arms = self._group(situation).arms
        untried = [
            name
            for name in names
            if arms[name].rounds < TRIAL_PULLS and not self._hopeless(name, situation, names)
        ]
        if untried:
            return ArmChoice(min(untried, key=lambda name: arms[name].rounds), explored=True)
        best = max(names, key=lambda name: arms[name].rate)
        if self._random.random() < self._settings.epsilon:
            hopeful = [name for name in names if arms[name].rate_at_best >= arms[best].rate]
            chosen = self._random.choice(hopeful)
            return ArmChoice(chosen, explored=chosen != best)
        return ArmChoice(best, explored=False)

    def _hopeless(self, name: str, situation: Situation, names: Sequence[str]) -> bool:
        """Whether the nearest group that has tried this arm says that it cannot be the best."""
        for group in self._nearest(situation):
            if group.arms[name].rounds >= TRIAL_PULLS:
                best = max(group.arms[one].rate for one in names)
                return group.arms[name].rate_at_best < HOPELESS * best
        return False
