"""Bandits over recorded and synthetic rollouts: time of each trace over that of the best schedule
in hindsight.

A schedule in hindsight knows every request's true chances, the cost table and the lengths; it takes
the arm of the most tokens per second, or the one that the last row needs, whichever gives the trace
the shorter time. Every chooser meets the same luck (bandit_world.py). Bandits run as served, under
their watchdog; time is simulated, choices are timed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from benchmarks.bandit.rivals import OURS, RIVALS, Fixed, Truth
from benchmarks.bandit.traces import Trace, read_traces
from benchmarks.bandit.world import World
from benchmarks.result import BenchResult, Goal, Row

OUR = "cost_model"
BEST_FIXED = "best fixed arm"
REGRET_GOAL, BEHIND_GOAL, CHOICE_GOAL_US = 5.0, 1.0, 50.0
QUICK_TRACES, QUICK_STEPS, QUICK_RESPONSES = 3, 2, 24


@dataclass(frozen=True, slots=True)
class Score:
    """One trace: regret of each chooser in percent, mean over seeds; median seconds of a choice and
    of a lesson.
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
        "--trace", action="append", help="only traces whose name begins so; may be repeated"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the beginning of three traces, one seed"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Play all traces. Raises NotFound or InvalidInput for missing or broken ones."""
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
    """No warnings of the watchdog meanwhile: drafters die on purpose here."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)


def shortened(trace: Trace) -> Trace:
    """The first responses of the first steps."""
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
    """Every chooser on one trace."""
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
    """Regret, the margin to each rival (negative: behind), and what a choice costs.

    All are `at least`, hence signs.
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
