"""Compares whole demo runs: no speculation, n-grams, a frozen drafter, and co-trained drafters.

Each run is `paceline demo` in its own process; the runs of a seed take turns of one step each. The
bench keeps finished runs, so an interrupted bench continues where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import demo_runs
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
ARMS: Mapping[str, Sequence[str]] = {
    "none": (),
    "ngram": (
        "gateway.drafter=ngram",
        'gateway.speculation.arms=["off","ngram:4_1_5"]',
        "coordinator.evaluation.probe_arm=ngram:4_1_5",
    ),
    OURS: (),
    "scratch": ("gateway.drafter=eagle", "drafter_trainer.drafter=eagle"),
    "frozen": (),
    "dflash": (
        'gateway.speculation.arms=["off","dflash:3_1_4","dflash:5_1_6","dflash:7_1_8","ngram:4_1_5"]',
        "coordinator.evaluation.probe_arm=dflash:5_1_6",
    ),
}
"""Settings of each arm. The arms "dflash" and "cotrained" are both co-trained, from start drafters
with equally long training.
"""
START_STEPS, BATCH_TOKENS = 2_000, 256
"""Optimiser steps of the demo's start drafter, and tokens of each step; see its make_drafter.py.
The steps of a co-trained drafter have the same size.
"""

RISE_GOAL, ACCEPT_GOAL, WAIT_GOAL, STEP_GOAL = 0.25, 3.3, 0.02, 1.2
SPEED_GOALS = {"none": 1.5, "ngram": 1.2, "frozen": 1.2}
NGRAMS_AT_MOST, FROZEN_FALLS = 2.5, 0.25
_SMOOTH = 5  # steps of the picture's running means


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=int, default=80, help="RL steps of a run")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument(
        "--frozen-steps",
        type=above_zero(int),
        default=40,
        help="optimiser steps that the frozen drafter has had for each RL step, beside its start's",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 30 steps")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-e2e"), help="folder of the runs"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of all runs"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Makes all runs, seed by seed; the runs of a seed take turns of one step each.

    Raises InvalidInput for an unknown arm.
    """
    seeds, steps = (1, 30) if options.quick else (options.seeds, options.steps)
    wanted = chosen_arms(options.arms)
    runs: list[DemoRun] = []
    for seed in range(seeds):
        runs += await finished_in_turns([_plan(options, seed, arm, steps) for arm in wanted])
        told = ", ".join(f"{one.arm} {_tokens_s(one):.0f}" for one in runs[-len(wanted) :])
        say(f"seed {seed}: {told} tokens/s")
    pictures(runs, options.out)
    return compare(runs, f"end to end, {steps} steps")


def chosen_arms(text: str) -> tuple[str, ...]:
    """Arms of a comma-separated list, in the order of the runs. Raises InvalidInput for an unknown
    arm.
    """
    named = set(text.split(","))
    if not named <= set(ARMS):
        raise InvalidInput("no such arm", seen=text, allowed=", ".join(ARMS))
    return tuple(arm for arm in ARMS if arm in named)


def compare(runs: Sequence[DemoRun], title: str) -> BenchResult:
    """Makes rows and goals of finished runs."""
    by_key = {(one.seed, one.arm): one for one in runs}
    rows = [_row(one, by_key.get((one.seed, runs[0].arm))) for one in runs]
    trained = [one for one in runs if one.arm == OURS] or list(runs)
    rise = statistics.median(one.rise for one in trained)
    goals: list[Goal] = [at_least("rise in held-out accuracy", RISE_GOAL, rise)]
    goals += _acceptance_goals(runs)
    for other, goal in SPEED_GOALS.items():
        if (ratio := speed_ratio(runs, other)) is not None:
            goals.append(ratio_goal(f"rollout tokens/s, {OURS} / {other}", goal, ratio))
    if (ratio := step_ratio(runs)) is not None:
        goals.append(ratio_goal(f"RL steps/s, {OURS} / none", STEP_GOAL, ratio))
    waits = [float(one.summary["preempt_wait_share"]) for one in runs if one.arm == OURS]
    if waits:
        goals.append(
            at_least("step time not spent waiting for the drafter", 1 - WAIT_GOAL, 1 - max(waits))
        )

    return BenchResult(title, rows, goals)


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
    out = options.out.absolute()

    async def made(name: str, trained: int, *words: str) -> str:
        """Trains a drafter of the start policy, once for all seeds; returns its path."""
        budget = (trained, trained * BATCH_TOKENS)
        return str(await demo_runs.trained_drafter(out / name, 0, *budget, *words))

    async def frozen() -> tuple[str, ...]:
        """Flags for a drafter with more training than a co-trained drafter gets."""
        trained = START_STEPS + options.frozen_steps * steps
        return ("--frozen-drafter", await made(f"drafter-{trained}", trained))

    async def block_parallel() -> tuple[str, ...]:
        """Settings for a DFlash drafter with as much training as the demo's start drafter."""
        start = await made("drafter-dflash", START_STEPS, "--speculator", "dflash")
        return (f"gateway.drafter={start}", f"drafter_trainer.drafter={start}")

    flags: Mapping[str, Flags] = {
        "none": WITHOUT,
        "ngram": WITHOUT,
        "frozen": frozen,
        "dflash": block_parallel,
    }
    settings = [*ARMS[arm], *options.overrides]
    return DemoPlan(out, seed, arm, steps, settings, flags.get(arm, NO_WORDS))


def _tokens_s(one: DemoRun) -> float:
    return statistics.median(one.rates)
