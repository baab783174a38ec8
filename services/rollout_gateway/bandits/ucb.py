"""UCB1 (Auer, Cesa-Bianchi and Fischer 2002, figure 1) over a sliding window.

Every arm is played once. Then the arm with the largest x + sqrt(2 ln n / n_j) is played: x is its
mean reward, n_j its rounds, and n the rounds of all candidate arms. Mean and counts cover the
group's window, so an arm without rounds in the window is played again.

The rule needs rewards in [0, 1]. A round's reward is its tokens per second divided by the highest
rate of any arm in the window. Past rewards are rescaled when that maximum moves, so one very fast
round has no effect after it has left the window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.services.rollout_gateway.bandits.base import ArmChoice, Situation
from paceline.services.rollout_gateway.bandits.window import ArmWindow, WindowedBandit


def ucb1_index(mean: float, rounds: int, total: int) -> float:
    """Upper confidence bound of an arm: `mean` reward in [0, 1], its `rounds` (>= 1), and the
    `total` rounds of all arms.
    """
    return mean + math.sqrt(2.0 * math.log(total) / rounds)


def highest_rate(arms: Iterable[ArmWindow]) -> float:
    """Highest tokens per second of any round in the window; 0 without rounds."""
    return max((rate for arm in arms for rate in arm.rates), default=0.0)


class UCB1(WindowedBandit):
    """Takes the arm with the largest upper confidence bound in the batch's group, without
    randomness.
    """

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        """Chooses an arm; `explored` is true if its mean is below the best mean."""
        arms = self._group(situation).arms
        for name in names:
            if not arms[name].rounds:
                return ArmChoice(name, explored=True)
        total = sum(arms[name].rounds for name in names)
        scale = highest_rate(arms.values()) or 1.0
        means = {name: sum(arms[name].rates) / arms[name].rounds / scale for name in names}
        chosen = max(names, key=lambda name: ucb1_index(means[name], arms[name].rounds, total))
        return ArmChoice(chosen, explored=means[chosen] < max(means.values()))
