"""Measures fronts: each load on each front and on its backend, in turns, then sessions held open.
Returns tables and goals.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from benchmarks.gateway.backends import MODEL, ScriptPace, paces_s, texts
from benchmarks.gateway.fronts import AT_ONCE, LITELLM, OURS, Front, open_sessions
from benchmarks.gateway.load import Order, median
from benchmarks.processes import BenchChild, Meter
from benchmarks.result import Goal, Row
from paceline.errors import InternalError

WARM_S = 2.0
WARM_STREAMS = 16
SEEDS_OF_A_RUN = 1 << 24
"""Prompts contain their seed, so that no run repeats a prompt of another run."""

MORE_TIMEOUT_S = 600.0

ADDED_P50_GOAL_MS, ADDED_P99_GOAL_MS, TIMES_LITELLM_GOAL = 2.0, 10.0, 3.0
GOAL_STREAMS = 16
SATURATED = 0.9
"""Share of a core above which the load's own process may have limited the figures."""

LATENCIES = ("first_p50_ms", "first_p99_ms", "whole_p50_ms", "whole_p99_ms")
ADDED = {
    "first_p50_ms": "first p50",
    "first_p99_ms": "first p99",
    "late_p50_ms": "end p50",
    "late_p99_ms": "end p99",
}
"""Figures compared with the backend's: first content, and the delay of a stream's end after the
rounds of its response.
"""


Run = Mapping[str, Any]
"""The result of load.summary, and "cpu_ms_per_request" of the front."""

Direct = Callable[[Order], Awaitable[Run]]


@dataclass(frozen=True, slots=True)
class Level:
    """A load: closed loops, or arrivals at a rate per second."""

    streams: int = 1
    rate: float = 0.0

    @property
    def name(self) -> str:
        """Name in the table."""
        if self.rate:
            return f"{self.rate:g}/s"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}"


@dataclass
class FrontUnderTest:
    """A front and the way to its backend; the measurements by level, one entry per repeat."""

    front: Front
    direct: Direct
    runs: dict[Level, list[Run]] = field(default_factory=dict)
    direct_runs: dict[Level, list[Run]] = field(default_factory=dict)


class Measurement:
    """The runs of one bench. `load` is the load's process."""

    def __init__(self, load: BenchChild, pace: ScriptPace, seconds: float) -> None:
        self._load = load
        self._pace = pace
        self._seconds = seconds
        self._numbers = itertools.count()

    async def warm(self, contenders: Sequence[FrontUnderTest]) -> None:
        """Runs uncounted requests, so that everything loaded at a first request is loaded."""
        for one in contenders:
            order = self.order(Level(WARM_STREAMS), WARM_S)
            await one.direct(order)
            await self.under_load(one.front, order)

    async def repeat(self, contenders: Sequence[FrontUnderTest], levels: Sequence[Level]) -> None:
        """Runs every level once, the contenders in turns; a front's run follows its backend's
        run.
        """
        for level in levels:
            for one in contenders:
                if not level.rate:
                    direct = await one.direct(self.order(level, self._seconds / 2))
                    one.direct_runs.setdefault(level, []).append(direct)
                run = await self.under_load(one.front, self.order(level, self._seconds))
                one.runs.setdefault(level, []).append(run)

    async def under_load(self, front: Front, order: Order) -> Run:
        """Does one run on a front. Raises InternalError if no answer arrives."""
        meter = Meter(front.pid)
        found = await self.ask(front.port, order)
        if not found["right"] + found["wrong"]:
            raise InternalError(f"{front.name} answered no request", seen=found["example"] or found)
        ended = found["right"] + found["wrong"]
        return {**found, "cpu_ms_per_request": 1e3 * meter.read().cpu_s / ended}

    async def ask(self, port: int, order: Order) -> Run:
        """Does one run of the load's process on any server."""
        return await self._load.ask(**{**asdict(order), "port": port})

    def order(self, level: Level, seconds: float, keys: Sequence[str] = ()) -> Order:
        """Makes an order with new prompts."""
        return Order(
            port=0,
            model=MODEL,
            texts=texts(self._pace),
            paces_s=paces_s(self._pace),
            think_s=self._pace.round_s,
            max_tokens=self._pace.most_tokens,
            streams=level.streams,
            seconds=seconds,
            rate=level.rate,
            keys=tuple(keys),
            first_seed=next(self._numbers) * SEEDS_OF_A_RUN,
        )


@dataclass(frozen=True, slots=True)
class HeldSessions:
    """Results for sessions held open."""

    sessions: int
    hold_s: float
    open_kib: float  # gateway memory per session before its first turn
    used_kib: float  # after one turn of each
    turns: Run


async def hold_sessions(
    front: Front, measurement: Measurement, count: int, hold_s: float
) -> HeldSessions:
    """Opens sessions, holds them, then takes one turn under each key.

    Raises InternalError if a session cannot be opened.
    """
    process = psutil.Process(front.pid)
    # memory that the first sessions load does not count
    await open_sessions(front, AT_ONCE, hold_s + MORE_TIMEOUT_S)
    await measurement.under_load(front, measurement.order(Level(AT_ONCE), 1.0))
    before = process.memory_info().rss
    keys = await open_sessions(front, count, hold_s + MORE_TIMEOUT_S)
    await asyncio.sleep(hold_s)
    opened = process.memory_info().rss
    turns = await measurement.under_load(front, measurement.order(Level(AT_ONCE), 0.0, keys))
    used = process.memory_info().rss
    return HeldSessions(
        count, hold_s, (opened - before) / count / 1024, (used - before) / count / 1024, turns
    )


def latency_rows(contenders: Sequence[FrontUnderTest], levels: Sequence[Level]) -> list[Row]:
    """Medians over the repeats: latencies at the front, and the time added to the backend's own."""
    rows: list[Row] = []
    for level in levels:
        for one in contenders:
            row: dict[str, str | float | None] = {
                "section": "latency of streamed chat completions, ms",
                "load": level.name,
                "front": one.front.name,
            }
            for key in LATENCIES:
                row[key.removesuffix("_ms").replace("_", " ")] = median(
                    run[key] for run in one.runs[level]
                )
            for key, name in ADDED.items():
                row[f"added {name}"] = added_ms(one, level, key)
            rows.append(row)

    return rows


def work_rows(contenders: Sequence[FrontUnderTest], levels: Sequence[Level]) -> list[Row]:
    """Requests per second, cost per request in the front's process, and counts of the results."""
    rows: list[Row] = []
    for level in levels:
        for one in contenders:
            runs = one.runs[level]
            busy = max(run["load_cpu_share"] for run in runs)
            rows.append(
                {
                    "section": "requests and their cost",
                    "load": level.name,
                    "front": one.front.name,
                    "requests/s": median(run["requests_per_s"] for run in runs),
                    "CPU ms/request": median(run["cpu_ms_per_request"] for run in runs),
                    "CPU us/chunk": median(
                        1e3 * run["cpu_ms_per_request"] / run["chunks_per_request"]
                        for run in runs
                        if run["chunks_per_request"]
                    ),
                    "chunks/request": median(run["chunks_per_request"] for run in runs),
                    "right": sum(run["right"] for run in runs),
                    "wrong": sum(run["wrong"] for run in runs),
                    "failed": sum(run["failed"] for run in runs),
                    "load generator's core": f"{busy:.0%}"
                    + (" saturated" if busy > SATURATED else ""),
                }
            )

    return rows


def session_row(held: HeldSessions) -> Row:
    """Makes the row of the sessions held open."""
    return {
        "section": "sessions held open",
        "sessions": held.sessions,
        "held s": held.hold_s,
        "KiB a session": held.open_kib,
        "KiB after a turn": held.used_kib,
        "answered right": held.turns["right"],
        "wrong": held.turns["wrong"],
        "failed": held.turns["failed"],
    }


def goals(
    contenders: Sequence[FrontUnderTest], levels: Sequence[Level], held: HeldSessions | None
) -> list[Goal]:
    """Goals: added latency, no lost tokens, sessions that answer, margin to LiteLLM.

    All goals are `at_least`; costs therefore change their signs.
    """
    by_name = {one.front.name: one for one in contenders}
    ours = by_name[OURS]
    found: list[Goal] = []
    level = Level(GOAL_STREAMS)
    if level in levels:
        for percent, goal in (("p50", ADDED_P50_GOAL_MS), ("p99", ADDED_P99_GOAL_MS)):
            worst = max(
                added_ms(ours, level, f"{part}_{percent}_ms") or 0.0 for part in ("first", "late")
            )
            name = f"minus added {percent} at {level.name}, ms, the worse of first content and end"
            found.append(Goal(name, -goal, -worst, worst <= goal))

    bad = sum(run["wrong"] + run["failed"] for runs in ours.runs.values() for run in runs)
    found.append(
        Goal("minus streams of ours with lost, doubled or other tokens", 0, -bad, bad == 0)
    )
    if held is not None:
        value = held.turns["right"] / held.sessions
        found.append(Goal("share of held sessions that answer", 1.0, value, value == 1))
    closed = [level for level in levels if not level.rate]
    if LITELLM in by_name and closed:
        most = closed[-1]
        pairs = zip(ours.runs[most], by_name[LITELLM].runs[most], strict=True)
        times = median(one["requests_per_s"] / other["requests_per_s"] for one, other in pairs)
        assert times is not None
        name = f"requests/s over LiteLLM's at {most.name}"
        found.append(Goal(name, TIMES_LITELLM_GOAL, times, times >= TIMES_LITELLM_GOAL))

    return found


def added_ms(one: FrontUnderTest, level: Level, key: str) -> float | None:
    """Median over repeats of a front's percentile less its backend's percentile; None without a
    backend's run.
    """
    direct = one.direct_runs.get(level, [])
    return median(run[key] - base[key] for run, base in zip(one.runs[level], direct, strict=False))
