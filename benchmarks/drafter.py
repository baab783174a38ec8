"""Measures the benefit of co-training a drafter: five demo runs over the same tasks, which change
their kind in the middle.

The arms are no speculation, n-grams and three drafters. The frozen drafter was warmed up on the
first tasks. The serial drafter trains after each policy step while all other services wait. The
harvested drafter trains on released slots.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import demo_runs
from benchmarks.demo_runs import NO_WORDS, WITHOUT, DemoPlan, DemoRun, Flags, demo_folder
from benchmarks.result import BenchResult, Goal, Row, at_least, paired_ratio, ratio_goal
from benchmarks.turns import finished_in_turns
from paceline.tasks import Task, write_tasks
from paceline.tasks.file import read_tasks

ARMS = ("harvested", "serial", "frozen", "ngram", "none")
"""Arms in the order of the tables."""

WAIT_GOAL, RECOVERY_STEPS, RECOVERED, PACKING_GOAL = 0.03, 5, 0.95, 2.0
ANSWERS = ("--answers", "1024")
"""Number of answers from which drafters of a fixed policy learn."""
PROBED = (
    "coordinator.evaluation.every=0",
    "coordinator.evaluation.heldout_prompts=128",
    "coordinator.evaluation.probe_every=1",
    "coordinator.evaluation.probe_prompts=48",
    # the drafter answers a shift within a few RL steps or not at all
    "drafter_trainer.gate.interval_steps=10",
)
Planner = Callable[..., DemoPlan]
SETTLED = 5
"""Number of probes before the shift; their mean is the acceptance level to return to."""


@dataclass(frozen=True, slots=True)
class Mixes:
    """Files of the tasks before and after the shift."""

    first: Path
    first_heldout: Path
    second: Path
    second_heldout: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--steps", type=int, default=60, help="RL steps of a run")
    parser.add_argument(
        "--shift-at", type=int, default=0, help="first step of the second task mix; 0: the middle"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="16 steps")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-drafter"), help="folder of the runs"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of all runs"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Makes all runs: first the independent arms in turns, then the arms that need the harvested
    run's figures. Keeps finished runs.
    """
    steps = 16 if options.quick else options.steps
    shift = options.shift_at or steps // 2
    out = options.out.absolute()
    mixes = write_mixes(out)
    tasks = _shifted(mixes, shift)
    plan = planner(out, options.seed, steps, [*tasks, *PROBED, *options.overrides])
    made = await finished_in_turns(first_plans(plan))
    made += await finished_in_turns(second_plans(plan, mixes, made[0]))
    runs = {arm: next(one for one in made if one.arm == arm) for arm in ARMS}

    scratch = await from_scratch(out, options.seed, runs["harvested"], mixes)
    packing = await _packing(out)
    return BenchResult(
        f"drafters, {steps} steps, other tasks from step {shift} on",
        [_row(arm, one, shift) for arm, one in runs.items()],
        goals(runs, shift, scratch, packing),
    )


def write_mixes(out: Path) -> Mixes:
    """Writes the demo's tasks in two mixes: prompts for subtractions and prompts for remainders.

    A prompt that begins the answer's first step fixes the answer's style. The policy can answer
    both mixes, while a drafter of the first mix has never seen the second.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = demo_runs.two_digits().parent
    mixes = Mixes(
        *(out / f"{name}.jsonl" for name in ("first", "first_heldout", "second", "second_heldout"))
    )
    for sign, train, heldout in (
        ("-", mixes.first, mixes.first_heldout),
        ("%", mixes.second, mixes.second_heldout),
    ):
        for source, written in (("tasks_train.jsonl", train), ("tasks_heldout.jsonl", heldout)):
            write_tasks(written, [_signed(task, sign) for task in read_tasks(folder / source)])

    return mixes


def _signed(task: Task, sign: str) -> Task:
    return Task(f"{task.task_id}{sign}", task.prompt + sign, task.answer, task.metadata)


def shifted_tasks(out: Path, shift: int) -> list[str]:
    """Settings of a run with the first mix until step `shift` and the second mix from there.

    Writes both mixes to the folder `out`.
    """
    return _shifted(write_mixes(out), shift)


def _shifted(mixes: Mixes, shift: int) -> list[str]:
    return [
        f"coordinator.tasks_path={mixes.first}",
        f"coordinator.heldout_path={mixes.first_heldout}",
        f"coordinator.later.{shift}.tasks_path={mixes.second}",
        f"coordinator.later.{shift}.heldout_path={mixes.second_heldout}",
    ]


def planner(out: Path, seed: int, steps: int, settings: Sequence[str]) -> Planner:
    """Returns a function that plans an arm with its own settings and flags."""

    def plan(arm: str, *own: str, flags: Flags = NO_WORDS) -> DemoPlan:
        return DemoPlan(out, seed, arm, steps, [*settings, *own], flags, demo_runs.two_digits())

    return plan


def first_plans(plan: Planner) -> list[DemoPlan]:
    """Plans of the arms that need no figures of another run."""
    ngrams = (
        "coordinator.drafter_enabled=false",
        "policy_trainer.push_head=false",
        "gateway.drafter=ngram",
        'gateway.speculation.arms=["off", "ngram:4_1_5"]',
        "coordinator.evaluation.probe_arm=ngram:4_1_5",
    )
    return [
        plan("harvested"),
        plan("ngram", *ngrams),
        plan("none", "coordinator.evaluation.probe_prompts=0", flags=WITHOUT),
    ]


def second_plans(plan: Planner, mixes: Mixes, harvested: DemoRun) -> list[DemoPlan]:
    """Plans of the arms that get as much training as the harvested drafter got."""
    most = max(1, round(harvested.summary["drafter_steps_per_rl_step"]))
    serial = ("coordinator.drafter_schedule=serial", f"coordinator.max_drafter_steps={most}")

    async def frozen() -> Sequence[str]:
        made = mixes.first.parent / "drafter-warm"
        policy = demo_runs.two_digits().parent / "policy_start"
        tasks = ("--tasks", str(mixes.first), "--heldout", str(mixes.first_heldout))
        model = ("--model", str(policy))
        await demo_runs.trained_drafter(
            made, harvested.seed, *harvested.drafter_budget, *tasks, *model, *ANSWERS
        )
        return ("--frozen-drafter", str(made))

    return [plan("serial", *serial), plan("frozen", flags=frozen)]


async def from_scratch(out: Path, seed: int, harvested: DemoRun, mixes: Mixes) -> float:
    """Acceptance length on the second mix of a drafter trained only on the harvested run's last
    policy.
    """
    directory = out / f"harvested-{seed}" / f"demo-{seed}-1"
    policy = out / "last-policy"
    made = out / "drafter-scratch"
    if not (policy / "model.safetensors").is_file():
        script = demo_folder() / "export_policy.py"
        await demo_runs.run_to_end(
            [sys.executable, str(script), "--run", str(directory), "--out", str(policy)]
        )

    tasks = ("--tasks", str(mixes.second), "--heldout", str(mixes.second_heldout))
    model = ("--model", str(policy))
    await demo_runs.trained_drafter(made, seed, *harvested.drafter_budget, *tasks, *model, *ANSWERS)
    return float(json.loads((made / "probe.json").read_text(encoding="utf-8"))["accept_length"])


async def _packing(out: Path) -> float:
    """Samples/s of packed rows over padded rows, measured by the process benchmarks.packing."""
    result = out / "packing.json"
    if not result.is_file():
        await demo_runs.run_to_end(
            [sys.executable, "-m", "benchmarks.packing", "--json", str(result)]
        )
    return float(json.loads(result.read_text(encoding="utf-8"))["ratio"])


def recovery(one: DemoRun, shift: int) -> tuple[float, float, int | None]:
    """Returns the acceptance before the shift, the lowest acceptance after it, and the steps until
    95 % of the former level (None: never).

    The probe of step s is made at the end of s, with the tasks of s.
    """
    before = [value for step, value in one.probes if step < shift][-SETTLED:]
    after = [(step - shift + 1, value) for step, value in one.probes if step >= shift]
    level = statistics.fmean(before)
    back = next((steps for steps, value in after if value >= RECOVERED * level), None)
    return level, min(value for _, value in after), back


def goals(runs: dict[str, DemoRun], shift: int, scratch: float, packing: float) -> list[Goal]:
    """Makes the goals of the five runs."""
    ours = runs["harvested"]
    back = recovery(ours, shift)[2]
    steps = float("inf") if back is None else float(back)
    last = settled(ours)
    return [
        at_least(
            "step time not spent waiting for the harvested drafter",
            1 - WAIT_GOAL,
            1 - _wait_share(ours),
        ),
        Goal(
            "steps back to 95 % of the acceptance before the shift",
            RECOVERY_STEPS,
            steps,
            steps <= RECOVERY_STEPS,
        ),
        *(
            _ratio_goal(f"tokens/s, harvested / {other}", ours.rates, runs[other].rates)
            for other in ("none", "ngram", "frozen", "serial")
        ),
        _ratio_goal(
            "step seconds, serial / harvested", _step_seconds(runs["serial"]), _step_seconds(ours)
        ),
        at_least(
            "acceptance at the end, harvested from cold / frozen warm",
            1.0,
            last / settled(runs["frozen"]),
        ),
        at_least(
            "acceptance at the end, harvested / from scratch on the last policy",
            1.0,
            last / scratch,
        ),
        at_least("packed / padded samples per second", PACKING_GOAL, packing),
    ]


def settled(one: DemoRun) -> float:
    """Mean acceptance length of the last probes."""
    return statistics.fmean(value for _, value in one.probes[-SETTLED:])


def _ratio_goal(name: str, over: Sequence[float], under: Sequence[float]) -> Goal:
    return ratio_goal(name, 1.0, paired_ratio(over, under))


def _step_seconds(one: DemoRun) -> list[float]:
    return [float(step["step_s"]) for step in one.steps]


def _means(one: DemoRun) -> list[float]:
    values = [value for _, value in one.probes]
    return [
        statistics.fmean(values[first : first + SETTLED])
        for first in range(0, len(values), SETTLED)
    ]


def _wait_share(one: DemoRun) -> float:
    return float(one.summary["preempt_wait_share"])


def _row(arm: str, one: DemoRun, shift: int) -> Row:
    before, lowest, back = recovery(one, shift) if one.probes else (None, None, None)
    return {
        "arm": arm,
        "tokens/s": statistics.median(one.rates),
        "step s": statistics.median(_step_seconds(one)),
        "E[len] before": before,
        "lowest after": lowest,
        "steps to 95 %": "never" if back is None and one.probes else back,
        "E[len] last": settled(one) if one.probes else None,
        "drafter slot-s/step": statistics.fmean(
            float(step.get("drafter_slot_s", 0.0)) for step in one.steps
        ),
        "drafter steps/step": one.summary["drafter_steps_per_rl_step"],
        "wait %": 100 * _wait_share(one),
        f"E[len], means of {SETTLED} steps": " ".join(f"{value:.1f}" for value in _means(one)),
    }
