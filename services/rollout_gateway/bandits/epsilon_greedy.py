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
    group. It explores arms that may be the best for all it knows: a round of another one could
    change no decision.
    """

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        arms = self._group(situation).arms
        least = min(names, key=lambda name: arms[name].rounds)
        if arms[least].rounds < TRIAL_PULLS:
            return ArmChoice(least, explored=True)
        best = max(names, key=lambda name: arms[name].rate)
        if self._random.random() < self._settings.epsilon:
            hopeful = [name for name in names if arms[name].rate_at_best >= arms[best].rate]
            chosen = self._random.choice(hopeful)
            return ArmChoice(chosen, explored=chosen != best)
        return ArmChoice(best, explored=False)
