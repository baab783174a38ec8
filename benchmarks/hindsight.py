"""Compares the default settings with the best fixed choice of a drafter, found only afterwards.

There are four workloads. On the demo's tasks, the policy moves away from its start. On tasks with
two-digit numbers, a drafter of the start policy also suits the trained policy. The third workload
shifts these tasks in the middle. The fourth repeats a few tasks in every step, so that n-grams
learn them by heart.

Each run is `paceline demo` in its own process; the runs of a seed take turns of one step each. The
bench keeps finished runs, so an interrupted bench continues where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import demo_runs
from benchmarks.demo_runs import NO_WORDS, WITHOUT, DemoPlan, DemoRun, words
from benchmarks.drafter import shifted_tasks
from benchmarks.options import above_zero
from benchmarks.result import BenchResult, Goal, Row, paired_ratio, ratio_goal, say
from benchmarks.turns import finished_in_turns
from paceline.errors import InvalidInput
from paceline.tasks import write_tasks
from paceline.tasks.file import read_tasks

OURS, NONE, FROZEN = "default", "none", "frozen"
_DRAFTED = 'gateway.speculation.arms=["eagle:5_1_6"]'
_NGRAMS = ("gateway.drafter=ngram", 'gateway.speculation.arms=["ngram:4_1_5"]')
ARMS: Mapping[str, Sequence[str]] = {
    OURS: (),
    NONE: (),
    "ngram": _NGRAMS,
    FROZEN: (_DRAFTED,),
    "cotrained": (_DRAFTED,),
}
"""Settings of each arm, in the order of the runs."""
WITHIN = 0.97
"""Least tokens/s as a share of the best fixed choice's."""
NO_EVALUATIONS = (
    "coordinator.evaluation.every=0",
    "coordinator.evaluation.probe_prompts=0",
    "coordinator.evaluation.heldout_prompts=128",
)
_MEMORISED_TASKS = 16


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Settings of the rollouts, the drafter trained on the start policy, and the settings file
    (None: the demo's).
    """

    settings: Sequence[str]
    drafter: Path
    file: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seeds", type=above_zero(int), default=3, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=above_zero(int), default=40, help="RL steps of a run")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="with commas")
    parser.add_argument(
        "--arms", default=",".join(ARMS), help=f"with commas; {OURS} and one more at least"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-hindsight"), help="folder of the runs"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of all runs"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Makes all runs, workload by workload. Raises InvalidInput for an unknown workload or arm."""
    named, arms = options.workloads.split(","), options.arms.split(",")
    if not set(named) <= set(WORKLOADS):
        raise InvalidInput("no such workload", seen=options.workloads, allowed=", ".join(WORKLOADS))
    if OURS not in arms or len(arms) < 2 or not set(arms) <= set(ARMS):
        allowed = f"{OURS} and one or more of {', '.join(arm for arm in ARMS if arm != OURS)}"
        raise InvalidInput("arms", seen=options.arms, allowed=allowed)
    runs: dict[str, list[DemoRun]] = {}
    for name in named:
        out = (options.out / name).absolute()
        out.mkdir(parents=True, exist_ok=True)
        workload = WORKLOADS[name](out, options.steps)
        runs[name] = []
        for seed in range(options.seeds):
            made = await finished_in_turns(
                [_plan(out, workload, arm, seed, options) for arm in arms]
            )
            speeds_of = {one.arm: statistics.median(one.all_rates) for one in made}
            told = ", ".join(f"{arm} {speed:.0f}" for arm, speed in speeds_of.items())
            say(f"{name}, seed {seed}: {told} tokens/s")
            runs[name] += made
    return compare(runs, options.steps)


def compare(runs: Mapping[str, Sequence[DemoRun]], steps: int) -> BenchResult:
    """Rows and goals of finished runs, by workload; pairs are equal steps of equal seeds."""
    rows: list[Row] = []
    goals: list[Goal] = []
    for name, of in runs.items():
        rows.append(_row(name, of))
        rates = speeds(of)
        best = best_fixed(of)
        ratio = paired_ratio(rates[OURS], rates[best])
        goals.append(ratio_goal(f"{name}: tokens/s, {OURS} / {best}", WITHIN, ratio))
    return BenchResult(f"default settings and fixed choices, {steps} steps", rows, goals)


def speeds(runs: Sequence[DemoRun]) -> dict[str, list[float]]:
    """Tokens/s of all steps of each arm, seed by seed."""
    found: dict[str, list[float]] = {}
    for one in sorted(runs, key=lambda run: run.seed):
        found.setdefault(one.arm, []).extend(one.all_rates)
    return found


def best_fixed(runs: Sequence[DemoRun]) -> str:
    """Returns the fastest fixed choice."""
    rates = speeds(runs)
    fixed = [arm for arm in rates if arm != OURS]
    return max(fixed, key=lambda arm: statistics.median(rates[arm]))


def _row(name: str, runs: Sequence[DemoRun]) -> Row:
    ours = [one.summary for one in runs if one.arm == OURS]
    decisions = [one["gate_decisions"] for one in ours]

    def each(decision: str) -> str:
        return ", ".join(str(one.get(decision, 0)) for one in decisions)

    def mean(figure: str) -> float:
        return statistics.fmean(one[figure] for one in ours)

    return {
        "workload": name,
        **{arm: round(statistics.median(rates)) for arm, rates in speeds(runs).items()},
        "promoted": each("promoted"),
        "froze": each("frozen"),
        "woke": each("reopened"),
        "drafter steps/step": mean("drafter_steps_per_rl_step"),
        "wait %": 100 * mean("preempt_wait_share"),
    }


def settings_of(workload: DemoWorkload, arm: str) -> list[str]:
    """Settings of an arm's run."""
    drafter = [f"{one}.drafter={workload.drafter}" for one in ("gateway", "drafter_trainer")]
    trained = drafter if arm in (OURS, "cotrained") else []
    return [*workload.settings, *NO_EVALUATIONS, *trained, *ARMS[arm]]


def _plan(
    out: Path, workload: DemoWorkload, arm: str, seed: int, options: argparse.Namespace
) -> DemoPlan:
    flags = WITHOUT if arm in (NONE, "ngram") else NO_WORDS
    if arm == FROZEN:
        flags = words("--frozen-drafter", str(workload.drafter))
    settings = [*settings_of(workload, arm), *options.overrides]
    return DemoPlan(out, seed, arm, options.steps, settings, flags, workload.file)


def _demo(out: Path, steps: int) -> DemoWorkload:
    return DemoWorkload((), demo_runs.demo_folder() / "drafter_start")


def _two_digits(out: Path, steps: int, *settings: str) -> DemoWorkload:
    file = demo_runs.two_digits()
    return DemoWorkload(settings, file.parent / "drafter_start", file)


def _shift(out: Path, steps: int) -> DemoWorkload:
    return _two_digits(out, steps, *shifted_tasks(out, steps // 2))


def _memorised(out: Path, steps: int) -> DemoWorkload:
    """Repeats as many tasks as a step has in every step, with nearly equal answers each time."""
    tasks = read_tasks(demo_runs.two_digits().parent / "tasks_train.jsonl")[:_MEMORISED_TASKS]
    write_tasks(out / "tasks.jsonl", tasks)
    tasks_path = f"coordinator.tasks_path={out / 'tasks.jsonl'}"
    return _two_digits(out, steps, tasks_path, "coordinator.sampling.temperature=0.5")


WORKLOADS = {
    "demo": _demo,
    "two_digits": _two_digits,
    "shift": _shift,
    "memorised": _memorised,
}
"""Workload name -> function that makes the workload in a folder, for a number of steps."""
