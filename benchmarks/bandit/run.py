"""Measures bandits over recorded and synthetic rollouts: time of each trace over the time of the
best schedule in hindsight.

A schedule in hindsight has every request's true chances, the cost table and the lengths. It chooses
the arm with the most tokens per second, or the arm that the last row needs. For each trace the
faster of both schedules counts. Every chooser gets the same luck (world.py). Bandits run as served,
under their watchdog. Time is simulated; choices are timed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import structlog

from benchmarks.bandit.world import Floats, Moment, Trace, World, read_traces
from benchmarks.result import BenchResult, Goal, Row
from paceline.arm_names import speculator_of
from paceline.services.rollout_gateway.bandits import build_bandit
from paceline.services.rollout_gateway.bandits.base import Bandit, BanditSettings, RoundOutcome
from paceline.trajectory import Target

CANDIDATES = {1: (3, 5, 7), 8: (0, 3), 32: (0, 3), 64: (0,)}
"""SGLang's default {1: [1, 3, 5, 7], 8: [0, 1, 3], 32: [0, 1], 64: [0]} with the chains that the
traces have.
"""
DOWN_HYSTERESIS = {1: -0.25}
EMA_SHARE, WARM_UP, INTERVAL = 0.2, 10, 5


class ServedBandit:
    """A bandit of the gateway's table under its watchdog."""

    def __init__(self, bandit: Bandit, arms: Sequence[str]) -> None:
        self._bandit = bandit
        self._drafting = {arm for arm in arms if speculator_of(arm)}
        self._eagle = {arm for arm in arms if speculator_of(arm) == "eagle"}
        self._explored = False

    def choose(self, moment: Moment) -> str:
        """Returns the bandit's choice."""
        choice = self._bandit.choose(moment.situation)
        self._explored = choice.explored
        return choice.arm

    def observe(self, moment: Moment, arm: str, taken: Sequence[int], seconds: float) -> None:
        """Passes the outcome of a round to the bandit."""
        self._bandit.observe(RoundOutcome(arm, moment.situation, taken, seconds, self._explored))

    def changed(self, target: Target) -> None:
        """Renews arms as engines do: n-grams do not change with a drafter."""
        self._bandit.renew(self._drafting if target is Target.POLICY else self._eagle, target)


class Fixed:
    """The same arm in every round."""

    def __init__(self, arm: str) -> None:
        self._arm = arm

    def choose(self, moment: Moment) -> str:
        """Returns the arm."""
        return self._arm

    def observe(self, moment: Moment, arm: str, taken: Sequence[int], seconds: float) -> None:
        """Ignores the outcome."""

    def changed(self, target: Target) -> None:
        """Ignores the change."""


class Truth(Fixed):
    """Chooses with the true chances, costs and lengths: by tokens per second, or by the time that
    tokens of the longest rows save.
    """

    def __init__(self, *, stragglers: bool) -> None:
        super().__init__("")
        self._stragglers = stragglers

    def choose(self, moment: Moment) -> str:
        """Returns the best arm of this round."""
        arms = moment.world.trace.arms
        tokens = np.array([moment.expected(arm) for arm in arms])
        seconds = np.array([moment.cost(arm, len(moment.rows)) for arm in arms])
        rates = tokens.sum(axis=1) / seconds
        if self._stragglers and moment.draining:
            usual = int(rates.argmax())
            rates = tokens @ self._worth(moment, tokens[usual], arms[usual]) / seconds
        return arms[int(rates.argmax())]

    def _worth(self, moment: Moment, tokens: Floats, arm: str) -> Floats:
        """Seconds that a token of each row saves, [B], in units of a round's seconds."""
        left = (moment.rollout.lengths[moment.rows] - moment.generated) / tokens
        fixed = moment.cost(arm, 1) / moment.cost(arm, len(moment.rows))
        last = (left == left.max()).astype(np.float64)
        worth: Floats = ((1 - fixed) / len(left) + fixed * last / last.sum()) / tokens
        return worth


class AdaptiveSteps:
    """SGLang's adaptive speculation (0.5.21, adaptive_spec_params.py): the chain steps follow the
    number of accepted drafts.

    Each batch-size slot has candidate steps and an exponential average (share 0.2) of accepted
    drafts per row. The average starts at the slot's steps - 1. It is checked at every fifth batch
    after ten. The steps go down while the average is at most the next smaller candidate less half a
    token (0.5 for candidate 0), plus the slot's hysteresis. Otherwise they go up while the average
    exceeds the present candidate less half a token. At 0 steps nothing is averaged, and the next
    check tries the smallest positive candidate. The rule measures no seconds and has no n-grams.
    This class is written from the behaviour of the rule.
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
        """Updates the average, and checks it at every INTERVAL-th batch."""
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
        """Does nothing: the average follows by itself."""

    @staticmethod
    def _slot(moment: Moment) -> int:
        return max(slot for slot in CANDIDATES if slot <= len(moment.rows))


def _bandit(kind: str, world: World, seed: int) -> ServedBandit:
    arms = world.trace.arms
    settings = BanditSettings(kind=kind)
    if kind == "beg":  # one number of draft tokens per group, and no n-grams beside EAGLE's
        arms = tuple(arm for arm in arms if speculator_of(arm) != "ngram")
        settings = BanditSettings(kind=kind, groups=(1, 5, 21))
    return ServedBandit(build_bandit(settings, arms, seed), arms)


RIVALS: dict[str, Callable[[World, int], ServedBandit | AdaptiveSteps]] = {
    "ucb": lambda world, seed: _bandit("ucb", world, seed),
    "beg": lambda world, seed: _bandit("beg", world, seed),
    "sglang adaptive": lambda world, seed: AdaptiveSteps(world.trace.arms),
}
OURS: dict[str, Callable[[World, int], ServedBandit]] = {
    "epsilon_greedy": lambda world, seed: _bandit("epsilon_greedy", world, seed),
}


OUR = "epsilon_greedy"
BEST_FIXED = "best fixed arm"
REGRET_GOAL, BEHIND_GOAL, CHOICE_GOAL_US = 5.0, 1.0, 50.0
QUICK_TRACES, QUICK_STEPS, QUICK_RESPONSES = 3, 2, 24


@dataclass(frozen=True, slots=True)
class Score:
    """One trace: regret of each chooser in percent (mean over seeds), and median seconds of a
    choice and of a lesson.
    """

    trace: Trace
    regret: Mapping[str, float]
    choice_s: Mapping[str, float]
    lesson_s: Mapping[str, float]  # of learning from a round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument(
        "--seeds", type=int, default=2, help="draws of luck and noise of each trace"
    )
    parser.add_argument(
        "--trace",
        action="append",
        help="only traces with this beginning of their name; may be repeated",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the beginning of three traces, one seed"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Plays all traces. Raises NotFound without traces, InvalidInput for a broken trace."""
    traces = [
        one
        for one in read_traces()
        if not options.trace or one.name.startswith(tuple(options.trace))
    ]
    if options.quick:
        traces = [shortened(one) for one in traces[:QUICK_TRACES]]
    with quiet():
        return report([score(one, 1 if options.quick else options.seeds) for one in traces])


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings of the watchdog, because drafters die on purpose here."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)


def shortened(trace: Trace) -> Trace:
    """Keeps the first responses of the first steps."""
    steps = [
        step.model_copy(
            update={
                "lengths": step.lengths[:QUICK_RESPONSES],
                "runs": {name: runs[:QUICK_RESPONSES] for name, runs in step.runs.items()},
            }
        )
        for step in trace.steps[:QUICK_STEPS]
    ]
    return trace.model_copy(update={"steps": tuple(steps)})


def score(trace: Trace, seeds: int) -> Score:
    """Plays one trace with every chooser."""
    regret: dict[str, list[float]] = {}
    choice_s: dict[str, list[float]] = {}
    lesson_s: dict[str, list[float]] = {}
    for seed in range(seeds):
        world = World(trace, seed)
        best = min(world.play(Truth(stragglers=stragglers)).seconds for stragglers in (False, True))
        fixed = min(world.play(Fixed(arm)).seconds for arm in trace.arms)
        regret.setdefault(BEST_FIXED, []).append(100 * (fixed / best - 1))
        for name, make in {**RIVALS, **OURS}.items():
            replay = world.play(make(world, seed))
            regret.setdefault(name, []).append(100 * (replay.seconds / best - 1))
            choice_s.setdefault(name, []).extend(replay.choices_s)
            lesson_s.setdefault(name, []).extend(replay.lessons_s)

    return Score(
        trace,
        {name: statistics.mean(values) for name, values in regret.items()},
        {name: statistics.median(values) for name, values in choice_s.items()},
        {name: statistics.median(values) for name, values in lesson_s.items()},
    )


def report(scores: Sequence[Score]) -> BenchResult:
    """A row per trace, their mean, the medians of the choices, and the goals."""
    names = [BEST_FIXED, *RIVALS, *OURS]
    means = {name: statistics.mean(one.regret[name] for one in scores) for name in names}
    timed = names[1:]
    choice_us = {
        name: 1e6 * statistics.median(one.choice_s[name] for one in scores) for name in timed
    }
    lesson_us = {
        name: 1e6 * statistics.median(one.lesson_s[name] for one in scores) for name in timed
    }
    rows: list[Row] = [{"trace": one.trace.name, **_rounded(one.regret, names)} for one in scores]
    rows.append({"trace": "mean regret, %", **_rounded(means, names)})
    rows.append({"trace": "choice p50, us", **_rounded(choice_us, names)})
    rows.append({"trace": "observe p50, us", **_rounded(lesson_us, names)})
    return BenchResult(
        "Time over the best schedule in hindsight, %", rows, goals_of(scores, means, choice_us[OUR])
    )


def goals_of(scores: Sequence[Score], means: Mapping[str, float], choice_us: float) -> list[Goal]:
    """Goals for the regret, the margin to each rival (negative: behind), and the cost of a choice.

    All goals are `at_least`; costs therefore change their signs.
    """
    goals = [
        Goal(f"{OUR}: minus mean regret, %", -REGRET_GOAL, -means[OUR], means[OUR] <= REGRET_GOAL)
    ]
    for rival in RIVALS:
        worst = min(scores, key=lambda one: one.regret[rival] - one.regret[OUR])
        margin = 100 * ((100 + worst.regret[rival]) / (100 + worst.regret[OUR]) - 1)
        name = f"{OUR} before {rival} on its worst trace ({worst.trace.name}), %"
        goals.append(Goal(name, -BEHIND_GOAL, margin, margin >= -BEHIND_GOAL))
        ahead = means[rival] - means[OUR]
        goals.append(Goal(f"{OUR} before {rival} in the mean, %", 0.0, ahead, ahead > 0))

    goals.append(
        Goal(
            f"{OUR}: minus choice p50, us", -CHOICE_GOAL_US, -choice_us, choice_us <= CHOICE_GOAL_US
        )
    )
    return goals


def _rounded(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float | None]:
    return {name: round(values[name], 2) if name in values else None for name in names}
