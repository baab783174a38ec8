"""Compares whole demo runs: no speculation, a frozen drafter, a co-trained one.

A run is `paceline demo` in a process of its own. Finished runs are kept, so a bench that was
interrupted goes on where it stood.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import demo_runs
from benchmarks.demo_runs import TAIL, DemoRun
from benchmarks.result import (
    BenchResult,
    Goal,
    Ratio,
    Row,
    at_least,
    paired_ratio,
    ratio_goal,
    say,
)
from paceline.errors import InvalidInput

ARMS = ("none", "cotrained", "frozen")
"""In the order in which one seed runs: the frozen drafter gets as much training as the co-trained
one had.
"""

RISE_GOAL, FINAL_GOAL, ACCEPT_GOAL, SPEED_GOAL, WAIT_GOAL = 0.25, 0.90, 3.2, 1.3, 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=int, default=200, help="RL steps of a run")
    parser.add_argument(
        "--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}; frozen needs cotrained"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 30 steps")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-e2e"), help="folder of the runs"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of all runs"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """All runs, seed by seed and arm by arm.

    Raises InvalidInput for arms that do not go together.
    """
    seeds, steps = (1, 30) if options.quick else (options.seeds, options.steps)
    wanted = chosen_arms(options.arms)
    runs: list[DemoRun] = []
    for seed in range(seeds):
        for arm in wanted:
            runs.append(
                await _one(options.out.absolute(), seed, arm, steps, options.overrides, runs)
            )
            say(f"seed {seed}, {arm}: {runs[-1].summary['wall_s']:.0f} s")
    return compare(runs, f"end to end, {steps} steps")


def chosen_arms(text: str) -> tuple[str, ...]:
    """Arms of a comma-separated list in the order in which they run."""
    named = set(text.split(","))
    if not named <= set(ARMS) or ("frozen" in named and "cotrained" not in named):
        raise InvalidInput(
            "these arms cannot be compared",
            seen=text,
            allowed=f"{', '.join(ARMS)}; frozen needs cotrained",
        )
    return tuple(arm for arm in ARMS if arm in named)


def compare(runs: Sequence[DemoRun], title: str) -> BenchResult:
    """Rows and goals of finished runs."""
    by_key = {(one.seed, one.arm): one for one in runs}
    rows = [_row(one, by_key.get((one.seed, "none"))) for one in runs]
    goals: list[Goal] = []
    trained = [one for one in runs if one.arm == "cotrained"] or list(runs)
    goals.append(
        at_least(
            "rise in held-out accuracy", RISE_GOAL, statistics.median(one.rise for one in trained)
        )
    )
    final = statistics.median(float(one.summary["accuracy_last"]) for one in trained)
    goals.append(at_least("final held-out accuracy (ambition)", FINAL_GOAL, final))
    accepted = [
        one.accept_length
        for one in runs
        if one.arm == "cotrained" and one.accept_length is not None
    ]
    if accepted:
        goals.append(
            at_least(
                f"acceptance length, last {TAIL} steps", ACCEPT_GOAL, statistics.median(accepted)
            )
        )

    for other, goal in (("none", SPEED_GOAL), ("frozen", 1.0)):
        ratio = speed_ratio(runs, other)
        if ratio is not None:
            goals.append(ratio_goal(f"tokens/s, cotrained / {other}", goal, ratio))

    waits = [float(one.summary["preempt_wait_share"]) for one in runs if one.arm == "cotrained"]
    if waits:
        goals.append(
            at_least("step time not spent waiting for the drafter", 1 - WAIT_GOAL, 1 - max(waits))
        )

    return BenchResult(title, rows, goals)


def speed_ratio(runs: Sequence[DemoRun], other: str) -> Ratio | None:
    """Rollout speed of the co-trained arm over another's: pairs are equal steps of equal seeds,
    hence equal tasks.
    """
    ours, theirs = list[float](), list[float]()
    for one in runs:
        match = next((two for two in runs if (two.seed, two.arm) == (one.seed, other)), None)
        if one.arm == "cotrained" and match is not None:
            ours += one.rates
            theirs += match.rates
    return paired_ratio(ours, theirs) if ours else None


def first_difference(one: DemoRun, other: DemoRun) -> int | None:
    """First step, counted from 1, whose sampled tokens differ; None when all are equal."""
    pairs = zip(one.steps, other.steps, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs, 1) if a["tokens_hash"] != b["tokens_hash"]), None
    )


def _row(one: DemoRun, baseline: DemoRun | None) -> Row:
    differs = (
        first_difference(one, baseline) if baseline is not None and one.arm != "none" else None
    )
    equal = one.steps[: differs - 1] if differs else one.steps
    curve = baseline is not None and all(
        a["reward_mean"] == b["reward_mean"] for a, b in zip(equal, baseline.steps, strict=False)
    )
    summary = one.summary
    return {
        "seed": one.seed,
        "arm": one.arm,
        "accuracy": f"{summary['accuracy_first']:.3f}→{summary['accuracy_last']:.3f}",
        "rise": one.rise,
        "accept": one.accept_length,
        "tokens/s": statistics.median(one.rates),
        "drafter steps/step": summary["drafter_steps_per_rl_step"],
        "wait %": 100 * summary["preempt_wait_share"],
        "tokens differ at": "" if one.arm == "none" else str(differs or "never"),
        "rewards equal": "" if one.arm == "none" else ("yes" if curve else "no"),
        "near-ties": summary["near_ties"],
        "wall s": summary["wall_s"],
        "CPU s": one.cpu_s,
    }


async def _one(
    out: Path, seed: int, arm: str, steps: int, overrides: Sequence[str], before: Sequence[DemoRun]
) -> DemoRun:
    """The finished run of a seed and an arm, made now if it is not there."""

    async def flags() -> list[str]:
        if arm == "frozen":
            trained = next(one for one in before if (one.seed, one.arm) == (seed, "cotrained"))
            return [
                "--frozen-drafter",
                str(await demo_runs.trained_drafter(out / f"drafter-{seed}", seed, trained)),
            ]
        return ["--no-speculation"] if arm == "none" else []

    return await demo_runs.finished_run(out, seed, arm, steps, flags, overrides)
