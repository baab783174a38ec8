"""Compares the held-out accuracy of several algorithms on whole demo runs, after the same number of
steps, from the same start, with the same seeds.

Each run is `paceline demo` in its own process. The bench keeps finished runs, so an interrupted
bench continues where it stopped.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import demo_runs
from benchmarks.demo_runs import DemoPlan, DemoRun
from benchmarks.e2e import RISE_GOAL
from benchmarks.options import above_zero
from benchmarks.picture import picture
from benchmarks.result import BenchResult, Goal, Row, at_least, say
from benchmarks.schedules import NO_EVALUATIONS
from paceline.errors import InvalidInput
from paceline.models.profiles import ROUNDED
from paceline.report.charts import Series, running_mean

_NAME, _OWN = "policy_trainer.algorithm.name", "policy_trainer.algorithm"
_TIS, _NONE = f"{_OWN}.correction.weight=token", f"{_OWN}.correction.required=false"


def _rounded(profile: str, correction: str) -> tuple[str, ...]:
    return f"{_NAME}=grpo", f"gateway.engine.embedded.profile={profile}", correction


BF16 = "grpo, bfloat16 with TIS"
"""Baseline for engines with eight-bit weights."""


def _late(lag: int) -> tuple[str, str]:
    return "coordinator.schedule=fully_async", f"coordinator.max_policy_lag={lag}"


ARMS: dict[str, tuple[str, ...]] = {
    "grpo": (f"{_NAME}=grpo",),
    "rloo": (f"{_NAME}=rloo",),
    "ppo": (f"{_NAME}=ppo", f"{_OWN}.critic_lr=1e-3", f"{_OWN}.critic_warmup_steps=5"),
    "gspo": (f"{_NAME}=gspo",),
    "dapo": (f"{_NAME}=dapo", "coordinator.dynamic_sampling_rounds=2"),
    "decoupled, eta 4": (f"{_NAME}=decoupled", *_late(4)),
    "decoupled, eta 8": (f"{_NAME}=decoupled", *_late(8)),
    "grpo, eta 8": (f"{_NAME}=grpo", *_late(8)),
    BF16: (f"{_NAME}=grpo", "gateway.engine.dtype=bfloat16", _TIS),
    **{f"grpo, {name} with TIS": _rounded(name, _TIS) for name in ROUNDED},
    **{f"grpo, {name} without": _rounded(name, _NONE) for name in ROUNDED},
}
"""Settings of each algorithm; all other settings are the demo's."""
_CORRECTED = tuple(f"grpo, {name} with TIS" for name in ROUNDED)
WORKLOADS = {"two_digits": demo_runs.two_digits(), "demo": None}
LATE = ("decoupled, eta 8", "grpo, eta 8")
_SMOOTH = 5  # steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seeds", type=above_zero(int), default=3, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=above_zero(int), default=60, help="RL steps of a run")
    parser.add_argument("--workload", choices=WORKLOADS, default="two_digits", help="tasks")
    parser.add_argument("--arms", default=";".join(ARMS), help="arms to run, separated by ;")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-algorithms"), help="folder of the runs"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of all runs"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Makes all runs, seed by seed. Raises InvalidInput for an unknown arm."""
    wanted = options.arms.split(";")
    if unknown := [arm for arm in wanted if arm not in ARMS]:
        raise InvalidInput("no such arm", seen=unknown[0], allowed="; ".join(ARMS))
    runs: list[DemoRun] = []
    for seed in range(options.seeds):
        for arm in wanted:
            given = (*NO_EVALUATIONS, *ARMS[arm], *options.overrides)
            out = options.out.absolute() / options.workload
            name, workload = arm.replace(", ", "-").replace(" ", ""), WORKLOADS[options.workload]
            plan = DemoPlan(out, seed, name, options.steps, given, workload=workload)
            made = await demo_runs.finished_run(plan)
            runs.append(DemoRun(seed, arm, made.summary, made.steps, made.cpu_s))
            say(f"seed {seed}, {arm}: accuracy {made.summary['accuracy_last']:.3f}")
    if pair := [one for one in runs if one.arm in LATE]:
        (options.out / "late.svg").write_text(late_picture(pair), encoding="utf-8")
    return compare(runs, f"{options.workload}, {options.steps} steps")


def compare(runs: Sequence[DemoRun], what: str) -> BenchResult:
    """Makes a row and a goal for each algorithm, and a goal for each profile beside bfloat16."""
    rows: list[Row] = []
    goals: list[Goal] = []
    for arm in dict.fromkeys(one.arm for one in runs):
        own = [one for one in runs if one.arm == arm]
        rows.append(
            {
                "algorithm": arm,
                "accuracy at the start": f"{own[0].summary['accuracy_first']:.3f}",
                "after": " ".join(f"{one.summary['accuracy_last']:.3f}" for one in own),
                "wall s": statistics.median(float(one.summary["wall_s"]) for one in own),
            }
        )
        rise = statistics.median(one.rise for one in own)
        goals.append(at_least(f"held-out accuracy gained, {arm}", RISE_GOAL, rise))
    lasts = {
        arm: [float(one.summary["accuracy_last"]) for one in runs if one.arm == arm]
        for arm in (BF16, *_CORRECTED)
    }
    goals += [
        within_noise(f"{arm}, less {BF16}", lasts[arm], lasts[BF16])
        for arm in _CORRECTED
        if lasts[arm] and lasts[BF16]
    ]
    return BenchResult(f"algorithms on {what}", rows, goals)


def within_noise(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Goal:
    """Compares the mean accuracies of two groups of runs.

    The difference must be at least -2 standard errors, estimated from the spread over the seeds.
    The goal stays open if a group has a single seed.
    """
    sides = (ours, theirs)
    value = statistics.fmean(ours) - statistics.fmean(theirs)
    if min(map(len, sides)) < 2:
        return Goal(f"held-out accuracy, {what}: one seed gives no noise", 0.0, value, None)
    noise = 2 * math.sqrt(sum(statistics.variance(one) / len(one) for one in sides))
    return at_least(f"held-out accuracy, {what}, within noise", -noise, value)


def late_picture(runs: Sequence[DemoRun]) -> str:
    """Draws rewards of runs that train tokens up to eight versions old, with and without
    correction.
    """
    lines = [
        Series(
            one.arm,
            running_mean(
                [(float(n), float(step["reward_mean"])) for n, step in enumerate(one.steps, 1)],
                _SMOOTH,
            ),
            f"c{LATE.index(one.arm)}",
        )
        for one in runs
    ]
    return picture(lines, "reward")
