"""UCB1 (Auer, Cesa-Bianchi and Fischer 2002, figure 1) over a sliding window.

Every arm is played once, then the one of the largest x + sqrt(2 ln n / n_j): x its mean reward, n_j
its rounds and n those of all arms it is chosen among. Mean and counts are those of the group's
window, so an arm that has left it is played once again.

The rule wants rewards in [0, 1]. A round's reward is its tokens per second over the running maximum
of the group: the highest rate of any round, of any arm, that the window holds at the moment of the
choice. Past rewards are thus rescaled when the maximum moves, and one round that seemed very fast
weighs no longer than the window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.services.rollout_gateway.bandits.base import ArmChoice, Situation
from paceline.services.rollout_gateway.bandits.window import ArmWindow, WindowedBandit


def ucb1_index(mean: float, rounds: int, total: int) -> float:
    """Upper confidence bound of an arm: mean reward in [0, 1], its rounds (>= 1), rounds of all
    arms.
    """
    return mean + math.sqrt(2.0 * math.log(total) / rounds)


def highest_rate(arms: Iterable[ArmWindow]) -> float:
    """Highest tokens per second of a round of the window; 0 while there is none."""
    return max((rate for arm in arms for rate in arm.rates), default=0.0)


class UCB1(WindowedBandit):
    """Takes the arm of the largest upper confidence bound in the batch's group; draws nothing at
    random.
    """

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        """It explores when it is not the best so far."""
        arms = self._group(situation).arms
        for name in names:
            if not arms[name].rounds:
                return ArmChoice(name, explored=True)
        total = sum(arms[name].rounds for name in names)
        scale = highest_rate(arms.values()) or 1.0
        means = {name: sum(arms[name].rates) / arms[name].rounds / scale for name in names}
        chosen = max(names, key=lambda name: ucb1_index(means[name], arms[name].rounds, total))
        return ArmChoice(chosen, explored=means[chosen] < max(means.values()))
