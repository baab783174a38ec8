"""Measures the costs that grow with a run's slots and hosts.

`simulation`: the coordinator's machine drives 8 to 4,096 slots on 1 to 512 hosts in virtual time.
The work grows with the slots. The bench reports the CPU time of the machine's real transitions and
their journal, and the journal's bytes. It also reports the modelled push to all hosts and the slots
that a drafter harvests. Virtual seconds are the same on every machine; CPU seconds are this
machine's.

`launch`: demo runs with and without a Ray cluster on this machine, in turns. The bench times the
start until all services serve, the whole run, and the recovery of a killed process and a killed
keeper.

`tasks`: tasks per second through one gateway over the scripted engine; both launchers start
gateways in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Mapping

from benchmarks.gateway.tasks import TasksPlan
from benchmarks.launched_tasks import launched_tasks
from benchmarks.launching import launches
from benchmarks.options import above_zero, counts
from benchmarks.result import BenchResult, Goal, Row, say
from benchmarks.simulation.scaled import (
    SCHEDULES,
    ScaledRun,
    growth_goals,
    plan_of,
    push_rows,
    repeats_of,
)
from paceline.services.coordinator.machine.settings import Placement, Schedule
from paceline.telemetry.log import configure_log

Found = tuple[list[Row], list[Goal]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS), help="to run")
    parser.add_argument("--slots", type=counts, default=(8, 64, 512, 4096), help="slots of a run")
    parser.add_argument("--steps", type=above_zero(int), default=3, help="of a run")
    parser.add_argument(
        "--schedules", choices=list(Schedule), nargs="+", default=list(SCHEDULES), type=Schedule
    )
    parser.add_argument("--placement", choices=list(Placement), default=Placement.COLOCATED)
    parser.add_argument(
        "--run-steps", type=above_zero(int), default=80, help="launch: RL steps of a demo run"
    )
    parser.add_argument(
        "--pairs",
        type=above_zero(int),
        default=1,
        help="launch, tasks: runs by each launcher",
    )
    parser.add_argument(
        "--calls", type=above_zero(int), default=9, help="tasks: of each gateway, one after another"
    )
    parser.add_argument(
        "--tasks", type=above_zero(int), default=128, help="tasks: of a call, 4 samples each"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Runs all selected parts."""
    configure_log("bench", "warning", True)
    rows: list[Row] = []
    goals: list[Goal] = []
    for part in options.parts:
        found, reached = await PARTS[part](options)
        rows += found
        goals += reached
    return BenchResult("scale", rows, goals)


def simulation(options: argparse.Namespace) -> Found:
    """Simulates every schedule at every number of slots."""
    rows, goals = push_rows(options.slots), []
    for schedule in options.schedules:
        runs: list[ScaledRun] = []
        for slots in options.slots:
            plan = plan_of(slots, schedule, Placement(options.placement))
            runs.append(ScaledRun.of(plan, options.steps, repeats_of(slots)))
            rows += runs[-1].rows()
            say(f"{schedule}, {slots} slots: {runs[-1].coordinator.step_s:.4f} CPU s a step")
        if len(runs) > 1:
            goals += growth_goals(runs[0], runs[-1])
    return sorted(rows, key=lambda row: str(row["section"]).partition(":")[0]), goals


async def launch(options: argparse.Namespace) -> Found:
    """Makes whole runs by both launchers."""
    return await launches(options.run_steps, options.pairs)


async def tasks(options: argparse.Namespace) -> Found:
    """Measures gateways of both launchers."""
    plan = TasksPlan(options.tasks, samples=4, tokens=128, repeats=options.calls)
    return await launched_tasks(plan, options.pairs), []


async def _simulation(options: argparse.Namespace) -> Found:
    return simulation(options)


PARTS: Mapping[str, Callable[[argparse.Namespace], Awaitable[Found]]] = {
    "simulation": _simulation,
    "launch": launch,
    "tasks": tasks,
}
