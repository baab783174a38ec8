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
from collections import deque
from collections.abc import Iterable, Sequence, Set

from rollout_gateway.bandits.base import ArmChoice, BanditSettings, Situation
from rollout_gateway.bandits.window import GroupWindow, PlayedRound, WindowedBandit


def ucb1_index(mean: float, rounds: int, total: int) -> float:
    """Upper confidence bound of an arm: mean reward in [0, 1], its rounds (>= 1), rounds of all
    arms.
    """
    return mean + math.sqrt(2.0 * math.log(total) / rounds)


class RateWindow(GroupWindow):
    """A window that knows the highest rate among its rounds."""

    def __init__(self, names: Sequence[str], window: int) -> None:
        super().__init__(names, window)
        self._peaks: deque[float] = deque()  # falling: rates that no later round exceeds

    @property
    def highest(self) -> float:
        """Highest tokens per second of a round; 0 while there is none."""
        return self._peaks[0] if self._peaks else 0.0

    def add(self, one: PlayedRound) -> PlayedRound | None:
        """Remember a round; the one that left the window for it."""
        self._climb([one])
        old = super().add(one)
        if old is not None and old.rate == self._peaks[0]:
            self._peaks.popleft()
        return old

    def forget(self, names: Set[str]) -> None:
        """Drop the rounds of these arms."""
        super().forget(names)
        self._peaks.clear()
        self._climb(self.rounds)

    def _climb(self, rounds: Iterable[PlayedRound]) -> None:
        for one in rounds:
            while self._peaks and self._peaks[-1] < one.rate:
                self._peaks.pop()
            self._peaks.append(one.rate)


class UCB1(WindowedBandit[RateWindow]):
    """Takes the arm of the largest upper confidence bound in the batch's group; draws nothing at
    random.
    """

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        super().__init__(settings, arms, seed, RateWindow)

    def choose_among(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        """The arm of the next round, one of `names`; it explores when it is not the best so far."""
        if len(names) == 1:
            return ArmChoice(names[0], explored=False)
        group = self._group(situation.batch_size)
        for name in names:
            if not group.arms[name].rounds:
                return ArmChoice(name, explored=True)
        total = sum(group.arms[name].rounds for name in names)
        scale = group.highest or 1.0
        means = {name: group.arms[name].mean_rate / scale for name in names}
        chosen = max(
            names, key=lambda name: ucb1_index(means[name], group.arms[name].rounds, total)
        )
        return ArmChoice(chosen, explored=means[chosen] < max(means.values()))
