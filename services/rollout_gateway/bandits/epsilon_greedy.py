"""Epsilon-greedy over a sliding window (Sutton and Barto 2018, section 2.4, with a window for a
moving world).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.services.rollout_gateway.bandits.base import (
    ArmChoice,
    BanditSettings,
    CostSample,
    Situation,
)
from paceline.services.rollout_gateway.bandits.prospects import Prospects
from paceline.services.rollout_gateway.bandits.window import WindowedBandit

TRIAL_PULLS = 4
"""Rounds of an arm that a group's window has to hold before the best is exploited; one of them may
be a warm-up.
"""
HOPELESS = 0.7
"""Without a table: of the best rate in the nearest group that knows an arm. Below it the arm is not
tried here.
"""


class EpsilonGreedy(WindowedBandit):
    """Explores with probability epsilon, else takes the arm of the highest rate in the batch's
    group. It tries and explores arms that may be the best for all it knows, here or in other
    groups: a round of another one could change no decision. Of one that is ruled out by what others
    know, chance takes a round all the same.
    """

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        super().__init__(settings, arms, seed)
        self._prospects = Prospects(arms)

    def prime(self, costs: Sequence[CostSample]) -> None:
        """Seconds that rounds took at the engine's start."""
        self._prospects.prime(costs)

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        arms = self._group(situation).arms
        untried = [name for name in names if arms[name].rounds < TRIAL_PULLS]
        tried = [name for name in names if name not in untried]
        best = max(tried, key=lambda name: arms[name].rate, default=None)
        trial = self._trial(situation, untried, best) if untried else None
        if trial is not None or best is None:
            return ArmChoice(trial or names[0], explored=True)
        if self._random.random() < self._settings.epsilon:
            hopeful = [name for name in names if arms[name].rate_at_best >= arms[best].rate]
            chosen = self._random.choice(hopeful)
            return ArmChoice(chosen, explored=chosen != best)
        return ArmChoice(best, explored=False)

    def _trial(self, situation: Situation, untried: Sequence[str], best: str | None) -> str | None:
        """The untried arm to be tried now: to its end before the next, which it may rule out."""
        arms = self._group(situation).arms
        rates = self._prospects.rates(situation, self._lengths())
        if rates is None:
            hopeful = [name for name in untried if not self._hopeless(name, situation)]
            return min(hopeful, key=lambda name: arms[name].rounds, default=None)
        least = rates[best] if best else 0.0
        hopeful = [name for name in untried if rates[name] >= least]
        return max(hopeful, key=lambda name: (arms[name].rounds, rates[name]), default=None)

    def _lengths(self) -> dict[str, float]:
        """Mean tokens per row and round of the arms that all windows together hold a trial of."""
        found: dict[str, float] = {}
        for name in self._names:
            windows = [group.arms[name] for group in self._groups.values()]
            rounds = sum(one.rounds for one in windows)
            if rounds >= TRIAL_PULLS:
                found[name] = sum(one.accepted for one in windows) / rounds
        return found

    def _hopeless(self, name: str, situation: Situation) -> bool:
        """Whether the nearest group that has tried this arm says that it cannot be the best."""
        for group in self._nearest(situation):
            if group.arms[name].rounds >= TRIAL_PULLS:
                best = max(one.rate for one in group.arms.values())
                return group.arms[name].rate_at_best < HOPELESS * best
        return False
