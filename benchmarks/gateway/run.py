"""Measures the gateway's front door beside LiteLLM's: streamed chat completions over HTTP before
the same scripted responses.

Our gateway serves in front of its engine worker, LiteLLM in front of an HTTP server. Both backends
give the same tokens at the same pace. The bench also calls the backends directly, and compares the
fronts' latencies with these calls. Load, fronts and backends are separate processes; CPU time is
the front's alone. Further parts measure sessions held open, agents' turns with their prefix in the
cache, and tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway import fronts as fronts
from benchmarks.gateway.at_once import at_once_goals, at_once_rows, measure_at_once
from benchmarks.gateway.backends import (
    MAX_BATCH,
    ScriptPace,
    direct_worker,
    engine_settings,
    write_model,
)
from benchmarks.gateway.load import Order
from benchmarks.gateway.measure import (
    FrontUnderTest,
    HeldSessions,
    Level,
    Measurement,
    Run,
    goals,
    hold_sessions,
    latency_rows,
    session_row,
    work_rows,
)
from benchmarks.gateway.tasks import TasksPlan, measure_tasks, task_rows
from benchmarks.gateway.turns import TurnPlan, TurnRun, measure_turns, turn_goals, turn_rows
from benchmarks.options import above_zero, counts, not_negative
from benchmarks.processes import child
from benchmarks.result import BenchResult, Row, say
from paceline.errors import InvalidInput

LOAD, BACKEND = "benchmarks.gateway.load", "benchmarks.gateway.backends"


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The plan made from the options."""

    levels: tuple[Level, ...]
    pace: ScriptPace
    seconds: float
    repeats: int
    sessions: int
    hold_s: float
    litellm: Path | None  # interpreter; None: no comparison
    settings: tuple[str, ...]
    turns: TurnPlan | None
    at_once: tuple[int, ...]
    at_once_turns: int
    tasks: TasksPlan | None

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of the scripted engine."""
        return engine_settings(self.pace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    option = parser.add_argument
    option("--streams", type=counts, default=(1, 16, 128), help="closed loops at once, a row each")
    option("--rate", type=not_negative(float), default=20.0, help="arrivals/s, open loop; 0: none")
    option("--seconds", type=above_zero(float), default=8.0, help="of one run")
    option("--repeats", type=above_zero(int), default=3, help="runs of each; medians are shown")
    option("--tokens", type=above_zero(int), default=128, help="of a response")
    option("--tokens-per-round", type=above_zero(int), default=4, help="tokens of a streamed chunk")
    option("--round-ms", type=not_negative(float), default=10.0, help="of the backends; 0: none")
    option("--sessions", type=not_negative(int), default=1000, help="held open; 0: none")
    option("--hold-s", type=not_negative(float), default=60.0, help="for which they are held")
    option("--at-once", type=counts, default=(), help="sessions of a run with a turn under way")
    option("--at-once-turns", type=above_zero(int), default=3, help="turns of each such session")
    option("--turns", type=not_negative(int), default=6, help="of a growing dialogue; 0: none")
    option("--dialogues", type=int, default=8, help="such dialogues at once")
    option("--turn-tokens", type=int, default=256, help="mean new prompt tokens of a turn")
    option(
        "--tasks", type=not_negative(int), default=128, help="of a call, 4 samples each; 0: none"
    )
    option("--litellm", action="store_true", help="beside LiteLLM's proxy, installed once")
    option("--litellm-python", type=Path, help="beside the LiteLLM of this interpreter")
    option("--set", action="append", default=[], metavar="KEY=VALUE", help="for our gateway")
    option("--quick", action="store_true", help="one short run of each, 50 sessions, 2 dialogues")


async def run(options: argparse.Namespace) -> BenchResult:
    """Starts all processes, measures and stops them.

    Raises InvalidInput for options out of range, NotFound outside a clone.
    """
    plan = await plan_of(options)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        model, script = write_model(folder, plan.engine)
        async with child(LOAD) as load:
            measurement = Measurement(load, plan.pace, plan.seconds)
            async with _contenders(plan, measurement, folder, model, script) as contenders:
                await measurement.warm(contenders)
                for number in range(plan.repeats):
                    say(f"repeat {number + 1} of {plan.repeats}")
                    await measurement.repeat(contenders, plan.levels)
            held = await _held(plan, measurement, folder, model, script)
        files = (folder, model, script)
        crowds = await measure_at_once(
            plan.at_once, plan.at_once_turns, plan.pace, files, plan.settings
        )
        turns: Mapping[str, Sequence[TurnRun]] = (
            await measure_turns(plan.turns, folder) if plan.turns else {}
        )
        ran = await measure_tasks(plan.tasks, folder, model, script) if plan.tasks else []

    rows: list[Row] = [*latency_rows(contenders, plan.levels), *work_rows(contenders, plan.levels)]
    rows += [session_row(held)] if held else []
    rows += [*at_once_rows(crowds), *turn_rows(turns)]
    rows += task_rows(plan.tasks, ran) if plan.tasks else []
    pace = plan.pace
    title = (
        f"the front door, {pace.tokens} tokens, {pace.tokens_per_round} every "
        f"{1e3 * pace.round_s:g} ms"
    )
    result = BenchResult(
        title,
        rows,
        [
            *goals(contenders, plan.levels, held),
            *at_once_goals(crowds),
            *turn_goals(turns),
        ],
    )
    if plan.litellm is None:
        return result
    version = await fronts.version_of_litellm(plan.litellm)
    return dataclasses.replace(result, versions={**result.versions, "litellm": version})


@asynccontextmanager
async def _contenders(
    plan: GatewayPlan, measurement: Measurement, folder: Path, model: Path, script: Path
) -> AsyncIterator[list[FrontUnderTest]]:
    """Runs the fronts, each with its own backend; all serve inside the block."""
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(fronts.gateway(folder, model, script, plan.settings))
        worker = await stack.enter_async_context(direct_worker(folder, model, plan.engine))
        found = [FrontUnderTest(ours, worker.run)]
        if plan.litellm is not None:
            backend = await stack.enter_async_context(child(BACKEND, json.dumps(asdict(plan.pace))))
            port = int((await backend.answer())["port"])
            theirs = await stack.enter_async_context(fronts.litellm(folder, plan.litellm, port))

            async def direct(order: Order) -> Run:
                return await measurement.ask(port, order)

            found.append(FrontUnderTest(theirs, direct))
        yield found


async def _held(
    plan: GatewayPlan, measurement: Measurement, folder: Path, model: Path, script: Path
) -> HeldSessions | None:
    """Measures sessions held open in a fresh gateway."""
    if not plan.sessions:
        return None
    say(f"{plan.sessions} sessions, held for {plan.hold_s:g} s")
    async with fronts.gateway(folder, model, script, plan.settings) as front:
        return await hold_sessions(front, measurement, plan.sessions, plan.hold_s)


async def plan_of(options: argparse.Namespace) -> GatewayPlan:
    """Makes the plan. Raises InvalidInput with the option's name, and the errors of
    litellm_python.
    """
    if options.streams[-1] > MAX_BATCH:
        raise InvalidInput("--streams are too many", seen=options.streams[-1], allowed=MAX_BATCH)
    wanted = options.litellm or options.litellm_python is not None
    levels = [Level(count) for count in options.streams]
    plan = GatewayPlan(
        levels=(*levels, Level(rate=options.rate)) if options.rate else tuple(levels),
        pace=ScriptPace(options.tokens, options.tokens_per_round, options.round_ms / 1e3),
        seconds=options.seconds,
        repeats=options.repeats,
        sessions=options.sessions,
        hold_s=options.hold_s,
        litellm=await fronts.litellm_python(options.litellm_python) if wanted else None,
        settings=tuple(options.set),
        turns=_turn_plan(options),
        at_once=options.at_once,
        at_once_turns=options.at_once_turns,
        tasks=_tasks_plan(options),
    )
    return dataclasses.replace(plan, **_quick(plan)) if options.quick else plan


def _quick(plan: GatewayPlan) -> dict[str, Any]:
    sessions = min(plan.sessions, 50)
    turns = plan.turns and dataclasses.replace(
        plan.turns, dialogues=min(plan.turns.dialogues, 2), repeats=1
    )
    return {
        "seconds": 1.0,
        "repeats": 1,
        "sessions": sessions,
        "hold_s": min(plan.hold_s, 1.0),
        "turns": turns,
        "tasks": plan.tasks and dataclasses.replace(plan.tasks, tasks=8, repeats=2),
    }


def _tasks_plan(options: argparse.Namespace) -> TasksPlan | None:
    if not options.tasks:
        return None
    return TasksPlan(options.tasks, 4, options.tokens, 3 * options.repeats)


def _turn_plan(options: argparse.Namespace) -> TurnPlan | None:
    if not options.turns:
        return None
    return TurnPlan(
        options.turns, options.dialogues, options.turn_tokens, options.repeats, tuple(options.set)
    )
