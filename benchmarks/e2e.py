"""Compares whole demo runs: no speculation, n-grams, a frozen drafter, and co-trained drafters.

The workload is the demo's small model, or the pretrained model of examples/real with short or long
answers, whose tasks need reasoning-gym (`python examples/real/fetch_model.py --tasks` prints its
directory for PYTHONPATH).

Each run is `paceline demo` in its own process; the runs of a seed take turns of one step each, as
many at once as memory holds. The bench keeps finished runs, so an interrupted bench continues where
it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import start_drafters
from benchmarks.demo_runs import NO_WORDS, WITHOUT, DemoPlan, DemoRun, Flags
from benchmarks.options import above_zero
from benchmarks.picture import picture
from benchmarks.result import (
    BenchResult,
    Goal,
    Ratio,
    Row,
    at_least,
    at_most,
    paired_ratio,
    ratio_goal,
    say,
)
from benchmarks.turns import finished_in_turns
from paceline.errors import InvalidInput
from paceline.report.charts import Series, running_mean

OURS = "cotrained"
_NGRAMS = (
    "gateway.drafter=ngram",
    'gateway.speculation.arms=["off","ngram:4_1_5"]',
    "coordinator.evaluation.probe_arm=ngram:4_1_5",
)
ARMS: Mapping[str, Sequence[str]] = {
    "none": (),
    "ngram": _NGRAMS,
    OURS: (),
    "scratch": ("gateway.drafter=eagle", "drafter_trainer.drafter=eagle"),
    "frozen": (),
    "dflash": (
        'gateway.speculation.arms=["off","dflash:3_1_4","dflash:5_1_6","dflash:7_1_8","ngram:4_1_5"]',
        "coordinator.evaluation.probe_arm=dflash:5_1_6",
    ),
}
"""Settings of each arm on the demo. The arms "dflash" and "cotrained" are both co-trained, from
start drafters with equally long training.
"""
_EVERY_KIND = (
    'gateway.speculation.arms=["off","eagle:2_1_3","self:2_1_3","self:4_1_5","ngram:4_1_5"]',
    "coordinator.evaluation.probe_arm=eagle:2_1_3",
)
REAL_ARMS: Mapping[str, Sequence[str]] = {
    "none": (),
    OURS: _EVERY_KIND,
    "ngram": _NGRAMS,
    "self": (
        "gateway.drafter=self",
        'gateway.speculation.arms=["off","self:2_1_3","self:4_1_5","ngram:4_1_5"]',
        "coordinator.evaluation.probe_arm=self:2_1_3",
    ),
    "frozen": _EVERY_KIND,
}
"""Settings of each arm on the pretrained model. "cotrained" starts from the drafter of "frozen"."""
RISE_GOAL, ACCEPT_GOAL, WAIT_GOAL = 0.25, 3.3, 0.02
NGRAMS_AT_MOST, FROZEN_FALLS = 2.5, 0.25
HINDSIGHT_GOAL = 0.97
_SMOOTH = 5  # steps of the picture's running means


@dataclass(frozen=True, slots=True)
class RunWorkload:
    """A model with its tasks: settings of its arms, and goals."""

    file: Path | None  # settings; None: the demo's
    arms: Mapping[str, Sequence[str]]
    default_arms: str  # with commas
    frozen_steps: int  # optimiser steps of the frozen drafter for each RL step
    at_once: int  # runs in memory that take turns
    speed_goals: Mapping[str, float]  # tokens/s of OURS over each arm
    step_goal: float  # RL steps/s of OURS over "none"


WORKLOADS: dict[str, RunWorkload] = {
    "demo": RunWorkload(
        file=None,
        arms=ARMS,
        default_arms=",".join(ARMS),
        frozen_steps=40,
        at_once=len(ARMS),
        speed_goals={"none": 1.5, "ngram": 1.2, "frozen": 1.2},
        step_goal=1.2,
    ),
    "real": RunWorkload(
        file=start_drafters.REAL,
        arms=REAL_ARMS,
        default_arms=f"none,{OURS},ngram,frozen",
        frozen_steps=5,
        at_once=2,
        speed_goals={"none": 1.3},
        step_goal=1.15,
    ),
}
WORKLOADS["reasoning"] = replace(WORKLOADS["real"], file=start_drafters.REASONING)
DEMO = WORKLOADS["demo"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=int, default=80, help="RL steps of a run")
    parser.add_argument("--workload", choices=WORKLOADS, default="demo")
    arms = "; ".join(f"{name}: {', '.join(one.arms)}" for name, one in WORKLOADS.items())
    parser.add_argument("--arms", help=f"with commas, of {arms}")
    parser.add_argument(
        "--frozen-steps",
        type=above_zero(int),
        help="optimiser steps that the frozen drafter has had for each RL step, beside its start's",
    )
    parser.add_argument(
        "--at-once", type=above_zero(int), help="runs in memory that take turns of one step"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 30 steps")
    parser.add_argument(
        "--out", type=Path, help="folder of the runs; default: runs/bench-e2e-WORKLOAD"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of all runs"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Makes all runs, seed by seed; runs of a seed take turns of one step each.

    Raises InvalidInput for an unknown arm.
    """
    workload = WORKLOADS[options.workload]
    options.out = options.out or Path(f"runs/bench-e2e-{options.workload}")
    seeds, steps = (1, 30) if options.quick else (options.seeds, options.steps)
    wanted = chosen_arms(options.arms or workload.default_arms, workload)
    at_once = options.at_once or workload.at_once
    runs: list[DemoRun] = []
    for seed in range(seeds):
        for first in range(0, len(wanted), at_once):
            together = wanted[first : first + at_once]
            runs += await finished_in_turns([_plan(options, seed, arm, steps) for arm in together])
        told = ", ".join(f"{one.arm} {_tokens_s(one):.0f}" for one in runs[-len(wanted) :])
        say(f"seed {seed}: {told} tokens/s")
    pictures(runs, options.out)
    return compare(runs, f"end to end, {steps} steps", workload)


def chosen_arms(text: str, workload: RunWorkload = DEMO) -> tuple[str, ...]:
    """Arms of a comma-separated list, in the order of the runs. Raises InvalidInput for an unknown
    arm.
    """
    named = set(text.split(","))
    if not named <= set(workload.arms):
        raise InvalidInput("no such arm", seen=text, allowed=", ".join(workload.arms))
    return tuple(arm for arm in workload.arms if arm in named)


def compare(runs: Sequence[DemoRun], title: str, workload: RunWorkload = DEMO) -> BenchResult:
    """Makes rows and goals of finished runs."""
    by_key = {(one.seed, one.arm): one for one in runs}
    rows = [_row(one, by_key.get((one.seed, runs[0].arm))) for one in runs]
    goals = _goals_of_the_demo(runs) if workload.file is None else _goals_of_real(runs, rows)
    for other, goal in workload.speed_goals.items():
        if (ratio := speed_ratio(runs, other)) is not None:
            goals.append(ratio_goal(f"rollout tokens/s, {OURS} / {other}", goal, ratio))
    if (ratio := step_ratio(runs)) is not None:
        goals.append(ratio_goal(f"RL steps/s, {OURS} / none", workload.step_goal, ratio))
    return BenchResult(title, rows, goals)


def _goals_of_the_demo(runs: Sequence[DemoRun]) -> list[Goal]:
    """Goals on learning, on acceptance and on the time that rollouts wait for the drafter."""
    trained = [one for one in runs if one.arm == OURS] or list(runs)
    rise = statistics.median(one.rise for one in trained)
    goals = [at_least("rise in held-out accuracy", RISE_GOAL, rise), *_acceptance_goals(runs)]
    waits = [float(one.summary["preempt_wait_share"]) for one in runs if one.arm == OURS]
    if waits:
        goals.append(
            at_least("step time not spent waiting for the drafter", 1 - WAIT_GOAL, 1 - max(waits))
        )
    return goals


def _goals_of_real(runs: Sequence[DemoRun], rows: Sequence[Row]) -> list[Goal]:
    """Goals on equal tokens, and on the default settings beside the best arm in hindsight."""
    goals: list[Goal] = []
    equal = [row["tokens differ at"] == "never" for row in rows if row["tokens differ at"]]
    if equal:
        share = statistics.fmean(equal)
        goals.append(at_least(f"share of runs with the tokens of {runs[0].arm}", 1.0, share))
    rates = {
        arm: statistics.median(rate for one in runs if one.arm == arm for rate in one.rates)
        for arm in {one.arm for one in runs} - {OURS}
    }
    best = max(rates, key=rates.__getitem__, default="")
    if (ratio := speed_ratio(runs, best)) is not None:
        name = f"rollout tokens/s, {OURS} / {best}, the best arm in hindsight,"
        goals.append(ratio_goal(name, HINDSIGHT_GOAL, ratio))
    return goals


def _acceptance_goals(runs: Sequence[DemoRun]) -> list[Goal]:
    """Goals that check the workload: the co-trained drafter follows the policy, while a frozen
    drafter and n-grams do not.
    """
    known = [(one, one.accept_length) for one in runs]
    lengths = {
        arm: [length for one, length in known if one.arm == arm and length is not None]
        for arm in ARMS
    }
    goals: list[Goal] = []
    if lengths[OURS]:
        ours = statistics.median(lengths[OURS])
        goals.append(at_least("acceptance length, last third of the steps", ACCEPT_GOAL, ours))
    if ngrams := [one.tokens_per_round for one in runs if one.arm == "ngram"]:
        # Not from probes: n-grams have seen earlier answers to the probes' prompts.
        name = "tokens a round of n-grams, last third of the steps"
        goals.append(at_most(name, NGRAMS_AT_MOST, statistics.median(ngrams)))
    if lengths["frozen"]:
        falls = [
            1 - one.accept_length / one.summary["accept_len_first"]
            for one in runs
            if one.arm == "frozen" and one.accept_length is not None
        ]
        fall = statistics.median(falls)
        goals.append(at_least("fall of the frozen drafter's acceptance", FROZEN_FALLS, fall))
    return goals


def speed_ratio(runs: Sequence[DemoRun], other: str) -> Ratio | None:
    """Rollout speed of the co-trained arm over another arm; None without pairs.

    A pair is the same step of the same seed, hence the same tasks.
    """
    return _paired(runs, other, lambda one: one.rates)


def step_ratio(runs: Sequence[DemoRun]) -> Ratio | None:
    """RL steps/s of the co-trained arm over the arm without speculation; None without pairs."""
    return _paired(runs, "none", lambda one: [1 / step["step_s"] for step in one.last_third])


def _paired(
    runs: Sequence[DemoRun], other: str, figures: Callable[[DemoRun], list[float]]
) -> Ratio | None:
    ours, theirs = list[float](), list[float]()
    for one in runs:
        match = next((two for two in runs if (two.seed, two.arm) == (one.seed, other)), None)
        if one.arm == OURS and match is not None:
            ours += figures(one)
            theirs += figures(match)
    return paired_ratio(ours, theirs) if ours else None


def pictures(runs: Sequence[DemoRun], out: Path) -> None:
    """Draws tokens/s and acceptance length by RL step: a line for each arm, means over seeds."""
    speeds, lengths = list[Series](), list[Series]()
    for number, arm in enumerate(dict.fromkeys(one.arm for one in runs)):
        own = [one for one in runs if one.arm == arm]
        by_step = enumerate(zip(*(one.all_rates for one in own), strict=False), 1)
        speed = [(float(n), statistics.fmean(of)) for n, of in by_step]
        speeds.append(Series(arm, running_mean(speed, _SMOOTH), f"c{number}"))
        probes = [[length for _, length in one.probes] for one in own]
        at = [float(step) for step, _ in own[0].probes]
        if at:
            means = [statistics.fmean(of) for of in zip(*probes, strict=False)]
            points = list(zip(at, means, strict=False))
            lengths.append(Series(arm, points, f"c{number}"))
    (out / "e2e-speed.svg").write_text(picture(speeds, "rollout tokens/s"), encoding="utf-8")
    if lengths:
        drawn = picture(lengths, "acceptance length")
        (out / "e2e-acceptance.svg").write_text(drawn, encoding="utf-8")


def first_difference(one: DemoRun, other: DemoRun) -> int | None:
    """First step, counted from 1, with different sampled tokens; None if all tokens are equal."""
    pairs = zip(one.steps, other.steps, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs, 1) if a["tokens_hash"] != b["tokens_hash"]), None
    )


def _row(one: DemoRun, first: DemoRun | None) -> Row:
    """The row of a run, beside the same seed's run of the first arm, which samples the same
    tokens.
    """
    beside = first if first is not None and first.arm != one.arm else None
    differs = first_difference(one, beside) if beside is not None else None
    equal = one.steps[: differs - 1] if differs else one.steps
    curve = beside is not None and all(
        a.get("reward_mean") == b.get("reward_mean")  # absent where it is 0
        for a, b in zip(equal, beside.steps, strict=False)
    )
    summary = one.summary
    return {
        "seed": one.seed,
        "arm": one.arm,
        "accuracy": f"{summary['accuracy_first']:.3f}→{summary['accuracy_last']:.3f}",
        "rise": one.rise,
        "accept": one.accept_length,
        "tokens/s": _tokens_s(one),
        "step s": statistics.median(step["step_s"] for step in one.last_third),
        "drafter steps/step": summary["drafter_steps_per_rl_step"],
        "wait %": 100 * summary["preempt_wait_share"],
        "tokens differ at": str(differs or "never") if beside is not None else "",
        "rewards equal": ("yes" if curve else "no") if beside is not None else "",
        "near-ties": summary["near_ties"],
        "s of all steps": sum(step["step_s"] for step in one.steps),
        "CPU s": one.cpu_s,
    }


def _plan(options: argparse.Namespace, seed: int, arm: str, steps: int) -> DemoPlan:
    out, workload = options.out.absolute(), WORKLOADS[options.workload]
    made = (
        partial(start_drafters.real_drafter, workload.file)
        if workload.file
        else start_drafters.demo_drafter
    )
    of_frozen = steps * (options.frozen_steps or workload.frozen_steps)

    async def frozen() -> tuple[str, ...]:
        """Flags for a drafter with more training than a co-trained drafter gets."""
        return ("--frozen-drafter", str(await made(options, out, of_frozen)))

    async def from_frozen() -> tuple[str, ...]:
        """Settings for co-training from the drafter of "frozen"."""
        return _co_trained(await made(options, out, of_frozen))

    async def block_parallel() -> tuple[str, ...]:
        """Settings for a DFlash drafter with as much training as the demo's start drafter."""
        return _co_trained(await start_drafters.dflash_drafter(out))

    flags: Mapping[str, Flags] = {
        "none": WITHOUT,
        "ngram": WITHOUT,
        "self": WITHOUT,
        "frozen": frozen,
        OURS: from_frozen if workload.file else NO_WORDS,
        "dflash": block_parallel,
    }
    settings = [*workload.arms[arm], *options.overrides]
    return DemoPlan(out, seed, arm, steps, settings, flags.get(arm, NO_WORDS), workload.file)


def _co_trained(start: Path) -> tuple[str, ...]:
    return (f"gateway.drafter={start}", f"drafter_trainer.drafter={start}")


def _tokens_s(one: DemoRun) -> float:
    return statistics.median(one.rates)
