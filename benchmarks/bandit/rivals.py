"""Who plays the traces: bandits as served, fixed arms, SGLang's adaptive rule, schedules that know
the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.bandit.world import Floats, Moment, World, outcome_of
from paceline.arm_names import speculator_of
from paceline.trajectory import Target
from rollout_gateway.bandits import Bandit, BanditSettings, build_bandit

CANDIDATES = {1: (3, 5, 7), 8: (0, 3), 32: (0, 3), 64: (0,)}
"""SGLang's default {1: [1, 3, 5, 7], 8: [0, 1, 3], 32: [0, 1], 64: [0]} with the chains that the
traces have.
"""
DOWN_HYSTERESIS = {1: -0.25}
EMA_SHARE, WARM_UP, INTERVAL = 0.2, 10, 5


class Served:
    """A bandit of the gateway's table under its watchdog."""

    def __init__(self, bandit: Bandit, arms: Sequence[str]) -> None:
        self._bandit = bandit
        self._drafting = {arm for arm in arms if speculator_of(arm)}
        self._eagle = {arm for arm in arms if speculator_of(arm) == "eagle"}
        self._explored = False

    def choose(self, moment: Moment) -> str:
        """The bandit's choice."""
        choice = self._bandit.choose(moment.situation)
        self._explored = choice.explored
        return choice.arm

    def observe(self, moment: Moment, arm: str, taken: Sequence[int], seconds: float) -> None:
        """For the bandit."""
        self._bandit.observe(outcome_of(moment, arm, taken, seconds, explored=self._explored))

    def changed(self, target: Target) -> None:
        """As engines tell it: n-grams do not change with a drafter."""
        self._bandit.forget(self._drafting if target is Target.POLICY else self._eagle, target)


class Fixed:
    """One arm for ever."""

    def __init__(self, arm: str) -> None:
        self._arm = arm

    def choose(self, moment: Moment) -> str:
        """The arm."""
        return self._arm

    def observe(self, moment: Moment, arm: str, taken: Sequence[int], seconds: float) -> None:
        """Nothing."""

    def changed(self, target: Target) -> None:
        """Nothing."""


class Truth(Fixed):
    """Knows true chances, costs and lengths: the most tokens per second, or the rows that will
    last.
    """

    def __init__(self, *, stragglers: bool) -> None:
        super().__init__("")
        self._stragglers = stragglers

    def choose(self, moment: Moment) -> str:
        """The best arm of this round."""
        arms = moment.world.trace.arms
        tokens = np.array([moment.expected(arm) for arm in arms])
        seconds = np.array([moment.cost(arm, len(moment.rows)) for arm in arms])
        rates = tokens.sum(axis=1) / seconds
        if self._stragglers and moment.situation.draining:
            usual = int(rates.argmax())
            rates = tokens @ self._worth(moment, tokens[usual], arms[usual]) / seconds
        return arms[int(rates.argmax())]

    def _worth(self, moment: Moment, tokens: Floats, arm: str) -> Floats:
        """Seconds that a token of each row spares, in units of a round's."""
        left = (moment.rollout.lengths[moment.rows] - moment.generated) / tokens
        fixed = moment.cost(arm, 1) / moment.cost(arm, len(moment.rows))
        last = (left == left.max()).astype(np.float64)
        worth: Floats = ((1 - fixed) / len(left) + fixed * last / last.sum()) / tokens
        return worth


class AdaptiveSteps:
    """SGLang's adaptive speculation (0.5.21, adaptive_spec_params.py): chain steps follow how many
    drafts are accepted.

    Each batch-size slot has candidate steps and an exponential average (share 0.2) of drafts
    accepted per row, which starts at its steps - 1. It is looked at every fifth batch after ten. It
    goes down while the average is at most the next smaller candidate less half a token (0.5 for
    candidate 0) plus the slot's hysteresis, else up while it exceeds the present candidate less
    half a token. At 0 steps nothing is averaged and the smallest positive candidate is tried at the
    next look. It measures no seconds and knows no n-grams. Written from what the rule does.
    """

    def __init__(self, arms: Sequence[str]) -> None:
        self._arms = {
            int(arm.split(":")[1].split("_")[0]): arm
            for arm in arms
            if speculator_of(arm) == "eagle"
        }
        self._arms[0] = "off"
        self._steps = {
            slot: candidates[len(candidates) // 2] for slot, candidates in CANDIDATES.items()
        }
        self._average = {slot: steps - 1.0 for slot, steps in self._steps.items()}
        self._batches = dict.fromkeys(CANDIDATES, 0)

    def choose(self, moment: Moment) -> str:
        """The chain of the slot's present steps."""
        return self._arms[self._steps[self._slot(moment)]]

    def observe(self, moment: Moment, arm: str, taken: Sequence[int], seconds: float) -> None:
        """Average, and look at it now and then."""
        slot = self._slot(moment)
        if self._steps[slot]:
            self._average[slot] += EMA_SHARE * (sum(taken) / len(taken) - 1 - self._average[slot])
        self._batches[slot] += 1
        late = self._batches[slot] - WARM_UP
        if late > 0 and late % INTERVAL == 0:
            self._look(slot)

    def _look(self, slot: int) -> None:
        candidates, average = CANDIDATES[slot], self._average[slot]
        before = at = candidates.index(self._steps[slot])
        if self._steps[slot] == 0:
            at = min(at + 1, len(candidates) - 1)
            if average < 0:
                self._average[slot] = candidates[at] - 1.0
        else:
            while at and average <= max(candidates[at - 1] - 0.5, 0.5) + DOWN_HYSTERESIS.get(
                slot, 0.0
            ):
                at -= 1
            while at >= before and at + 1 < len(candidates) and average > candidates[at] - 0.5:
                at += 1
        self._steps[slot] = candidates[at]

    def changed(self, target: Target) -> None:
        """Nothing: it follows."""

    @staticmethod
    def _slot(moment: Moment) -> int:
        return max(slot for slot in CANDIDATES if slot <= len(moment.rows))


def _bandit(kind: str, world: World, seed: int, *, primed: bool = False) -> Served:
    arms = world.trace.arms
    settings = BanditSettings(kind=kind)
    if (
        kind == "beg"
    ):  # as many numbers of draft tokens as groups, and no n-grams among EAGLE's budgets
        arms = tuple(arm for arm in arms if speculator_of(arm) != "ngram")
        settings = BanditSettings(kind=kind, groups=(1, 5, 21))
    bandit = build_bandit(settings, arms, seed)
    if primed:
        bandit.prime(world.primer(seed))
    return Served(bandit, arms)


RIVALS: dict[str, Callable[[World, int], Served | AdaptiveSteps]] = {
    "epsilon_greedy": lambda world, seed: _bandit("epsilon_greedy", world, seed),
    "ucb": lambda world, seed: _bandit("ucb", world, seed),
    "thompson": lambda world, seed: _bandit("thompson", world, seed),
    "beg": lambda world, seed: _bandit("beg", world, seed),
    "sglang adaptive": lambda world, seed: AdaptiveSteps(world.trace.arms),
}
OURS: dict[str, Callable[[World, int], Served]] = {
    "cost_model": lambda world, seed: _bandit("cost_model", world, seed, primed=True),
    "cost_model, not primed": lambda world, seed: _bandit("cost_model", world, seed),
}
