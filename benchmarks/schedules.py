"""Compares whole demo runs under every schedule and placement: tokens trained per second, their
age, and the reward reached.

Each run is `paceline demo` in its own process. The bench keeps finished runs, so an interrupted
bench continues where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks import demo_runs
from benchmarks.demo_runs import DemoPlan, DemoRun
from benchmarks.options import above_zero
from benchmarks.result import BenchResult, Goal, Row, at_least, at_most, say
from paceline.errors import InvalidInput

APART = ("placement=disaggregated", "learner_slots=1")
NO_EVALUATIONS = ("coordinator.evaluation.every=0", "coordinator.evaluation.probe_every=0")
"""Disables evaluations: they happen between steps and would add the same pause to every run."""
CORRECTED = "policy_trainer.algorithm.correction.weight=token"
"""Correction for the arm with tokens from weights two versions old."""
LAGS = {"sync": 0, "one_step_off": 1, "fully_async": 2}
ACCURACY_WITHIN = 0.05
"""Most that a schedule's held-out accuracy may be below `sync`, by the median of the seeds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seeds", type=above_zero(int), default=1, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=above_zero(int), default=40, help="RL steps of a run")
    parser.add_argument(
        "--arms", default=",".join(arms()), help="with commas; every placement with its sync arm"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-schedules"), help="folder of the runs"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of all runs"
    )


def arms() -> dict[str, tuple[str, ...]]:
    """Settings of each arm: colocated on two slots, or one worker beside one policy rank."""
    found: dict[str, tuple[str, ...]] = {}
    for schedule, lag in LAGS.items():
        chosen = (f"schedule={schedule}", f"max_policy_lag={lag}")
        corrected = (CORRECTED,) if lag > 1 else ()
        together = tuple(f"coordinator.{one}" for one in chosen)
        apart = tuple(f"coordinator.{one}" for one in (*chosen, *APART))
        found[schedule] = (*together, *corrected)
        found[f"{schedule}-apart"] = (*apart, "gateway.engine.workers=1", *corrected)
    return found


async def run(options: argparse.Namespace) -> BenchResult:
    """Makes all runs, seed by seed and arm by arm.

    Raises InvalidInput for arms that cannot be compared.
    """
    wanted = chosen_arms(options.arms)
    runs: list[DemoRun] = []
    for seed in range(options.seeds):
        for arm, settings in wanted.items():
            given = (*NO_EVALUATIONS, *settings, *options.overrides)
            out = options.out.absolute()
            plan = DemoPlan(out, seed, arm, options.steps, given, workload=demo_runs.two_digits())
            made = await demo_runs.finished_run(plan)
            runs.append(made)
            say(f"seed {seed}, {arm}: {tokens_s(made):.0f} tokens trained a second")
    return compare(runs, options.steps)


def chosen_arms(text: str) -> dict[str, tuple[str, ...]]:
    """Settings of the arms in a comma-separated list, in the order of the runs.

    Raises InvalidInput for unknown arms, and for arms without the sync arm of their placement.
    """
    named, known = set(text.split(",")), arms()
    beside = {_baseline(arm) for arm in named}
    if not named <= set(known) or not beside <= named:
        raise InvalidInput(
            "these arms cannot be compared",
            seen=text,
            allowed=f"{', '.join(known)}; each placement's arms with its sync arm",
        )
    return {arm: settings for arm, settings in known.items() if arm in named}


def compare(runs: Sequence[DemoRun], steps: int) -> BenchResult:
    """Makes rows and goals of finished runs."""
    by_key = {(one.seed, one.arm): one for one in runs}
    rows: list[Row] = []
    goals: list[Goal] = []
    for one in runs:
        beside = by_key[one.seed, _baseline(one.arm)]
        rows.append(_row(one, beside))
    for arm in dict.fromkeys(one.arm for one in runs):
        own = [one for one in runs if one.arm == arm]
        lag = LAGS[arm.removesuffix("-apart")]
        late = sum(count for one in own for age, count in staleness(one).items() if age > lag)
        goals.append(at_most(f"samples trained beyond the lag allowed, {arm}", 0, late))
        if arm == _baseline(arm):
            continue
        pairs = [(one, by_key[one.seed, _baseline(arm)]) for one in own]
        faster = statistics.median(tokens_s(one) / tokens_s(sync) for one, sync in pairs)
        goals.append(at_least(f"tokens trained a second over sync, {arm}", 1.0, faster))
        lost = statistics.median(_accuracy(sync) - _accuracy(one) for one, sync in pairs)
        goals.append(at_most(f"held-out accuracy below sync's, {arm}", ACCURACY_WITHIN, lost))
    return BenchResult(f"schedules on the demo, {steps} steps", rows, goals)


def tokens_s(one: DemoRun) -> float:
    """Tokens trained per second, prompts included.

    The time runs from the end of the first step, when services are warm, to the end of the last
    step.
    """
    ends = [float(step["finished_at_s"]) for step in one.steps]
    trained = sum(step["policy"]["batch_tokens"] for step in one.steps[1:])
    return float(trained / (ends[-1] - ends[0]))


def waiting(one: DemoRun) -> float:
    """Share of the same time in which the learner had no batch.

    Waiting for its slots, training, pushing and committing count as busy.
    """
    ends = [float(step["finished_at_s"]) for step in one.steps]
    busy = sum(
        step.get("policy_s", 0.0) + step.get("preempt_wait_s", 0.0) for step in one.steps[1:]
    )
    return float(1 - busy / (ends[-1] - ends[0]))


def staleness(one: DemoRun) -> Counter[int]:
    """Samples trained, by the policy versions between their oldest token and the trained one."""
    found: Counter[int] = Counter()
    for step in one.steps:
        found.update({int(age): int(count) for age, count in step.get("staleness", {}).items()})
    return found


def _row(one: DemoRun, sync: DemoRun) -> Row:
    ages = staleness(one)
    return {
        "seed": one.seed,
        "arm": one.arm,
        "tokens/s": tokens_s(one),
        "over sync": tokens_s(one) / tokens_s(sync),
        "learner waits": f"{waiting(one):.0%}",
        "samples by age": " ".join(f"{age}:{ages[age] / ages.total():.2f}" for age in sorted(ages)),
        "reward": f"{one.steps[0].get('reward_mean', 0.0):.3f}→{_reward(one):.3f}",
        "accuracy": f"{one.summary['accuracy_first']:.3f}→{_accuracy(one):.3f}",
        "wall s": one.summary["wall_s"],
        "CPU s": one.cpu_s,
    }


def _reward(one: DemoRun) -> float:
    """Mean reward of the last fifth of the steps."""
    last = one.steps[-max(1, len(one.steps) // 5) :]
    return statistics.fmean(float(step.get("reward_mean", 0.0)) for step in last)


def _accuracy(one: DemoRun) -> float:
    return float(one.summary["accuracy_last"])


def _baseline(arm: str) -> str:
    return "sync-apart" if arm.endswith("-apart") else "sync"
