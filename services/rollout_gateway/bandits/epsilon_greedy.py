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
HOPELESS = 0.7
"""Share of the best rate in the nearest group that has tried an arm; below it the arm is not tried
in this group.
"""


class EpsilonGreedy(WindowedBandit):
    """Explores with probability epsilon, else takes the arm of the highest rate in the batch's
    group. It tries and explores only arms that may still be the best by the evidence of all groups.
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
        """The untried arm of the fewest rounds; None when other groups rule all of them out."""
        arms = self._group(situation).arms
        hopeful = [name for name in untried if not self._hopeless(name, situation)]
        return min(hopeful, key=lambda name: arms[name].rounds, default=None)

    def _hopeless(self, name: str, situation: Situation) -> bool:
        """Whether the arm cannot be the best, by the nearest group that has tried it."""
        for group in self._nearest(situation):
            if group.arms[name].rounds >= TRIAL_PULLS:
                best = max(one.rate for one in group.arms.values())
                return group.arms[name].rate_at_best < HOPELESS * best
        return False
