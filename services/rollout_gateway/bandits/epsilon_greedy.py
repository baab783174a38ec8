"""Epsilon-greedy over a sliding window (Sutton and Barto 2018, section 2.4), since arms change."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.services.rollout_gateway.bandits.base import ArmChoice, Situation
from paceline.services.rollout_gateway.bandits.window import WindowedBandit

TRIAL_PULLS = 4
"""Rounds of an arm that a group's window must hold before the arm counts as tried. The first may be
a warm-up.
"""
HOPELESS = 0.7
"""Share of the best rate, measured in the nearest group that has tried the arm. An arm below this
share is not tried in the present group.
"""


class EpsilonGreedy(WindowedBandit):
    """Explores with probability epsilon, otherwise takes the fastest arm of the batch's group. Only
    arms that may be the best by the evidence of all groups are tried or explored.
    """

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        arms = self._group(situation).arms
        untried = [name for name in names if arms[name].rounds < TRIAL_PULLS]
        tried = [name for name in names if name not in untried]
        best = max(tried, key=lambda name: arms[name].rate, default=None)
        trial = self._trial(situation, untried)
        if trial is not None or best is None:
            return ArmChoice(trial or names[0], explored=True)
        if self._random.random() < self._settings.epsilon:
            hopeful = [name for name in names if arms[name].rate_at_best >= arms[best].rate]
            chosen = self._random.choice(hopeful)
            return ArmChoice(chosen, explored=chosen != best)
        return ArmChoice(best, explored=False)

    def _trial(self, situation: Situation, untried: Sequence[str]) -> str | None:
        """The untried arm with the fewest rounds; None when other groups exclude all of
        `untried`.
        """
        arms = self._group(situation).arms
        hopeful = [name for name in untried if not self._hopeless(name, situation)]
        return min(hopeful, key=lambda name: arms[name].rounds, default=None)

    def _hopeless(self, name: str, situation: Situation) -> bool:
        """Whether the nearest group that has tried the arm excludes it as the best."""
        for group in self._nearest(situation):
            if group.arms[name].rounds >= TRIAL_PULLS:
                best = max(one.rate for one in group.arms.values())
                return group.arms[name].rate_at_best < HOPELESS * best
        return False
