"""Tables and goals of the gateway's bench. Owns what is compared with what; measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from paceline.bench.result import Goal, Row
from rollout_gateway.bench.gateway_fronts import LITELLM, OURS
from rollout_gateway.bench.gateway_measure import Contender, Level
from rollout_gateway.bench.gateway_sessions import Held

ADDED_P50_GOAL_MS, ADDED_P99_GOAL_MS, TIMES_LITELLM_GOAL = 2.0, 10.0, 3.0
GOAL_STREAMS = 16
SATURATED = 0.9
"""Share of a core above which the load's own process may have set the figures."""

LATENCIES = ("first_p50_ms", "first_p99_ms", "whole_p50_ms", "whole_p99_ms")
ADDED = {
    "first_p50_ms": "first p50",
    "first_p99_ms": "first p99",
    "late_p50_ms": "end p50",
    "late_p99_ms": "end p99",
}
"""Compared with the backend's: first content, and how long after the rounds of its response a stream's end came."""


def latency_rows(contenders: Sequence[Contender], levels: Sequence[Level]) -> list[Row]:
    """Medians over the repeats: latencies at the front, and what they add to the backend's own."""
    rows: list[Row] = []
    for level in levels:
        for one in contenders:
            row: dict[str, str | float | None] = {
                "section": "latency of streamed chat completions, ms",
                "load": level.name,
                "front": one.front.name,
            }
            for key in LATENCIES:
                row[key.removesuffix("_ms").replace("_", " ")] = median(run[key] for run in one.runs[level])
            for key, name in ADDED.items():
                row[f"added {name}"] = added_ms(one, level, key)
            rows.append(row)
    return rows


def work_rows(contenders: Sequence[Contender], levels: Sequence[Level]) -> list[Row]:
    """Requests a second, what one costs the front's process, and what came of all of them."""
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
                    "chunks/request": median(run["chunks_per_request"] for run in runs),
                    "right": sum(run["right"] for run in runs),
                    "wrong": sum(run["wrong"] for run in runs),
                    "failed": sum(run["failed"] for run in runs),
                    "load generator's core": f"{busy:.0%}" + (" saturated" if busy > SATURATED else ""),
                }
            )
    return rows


def session_row(held: Held) -> Row:
    """Sessions held open."""
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


def goals(contenders: Sequence[Contender], levels: Sequence[Level], held: Held | None) -> list[Goal]:
    """Added latency, no token lost, sessions that answer, margin to LiteLLM. All are `at least`, hence signs."""
    by_name = {one.front.name: one for one in contenders}
    ours = by_name[OURS]
    found: list[Goal] = []
    level = Level(GOAL_STREAMS)
    if level in levels:
        for percent, goal in (("p50", ADDED_P50_GOAL_MS), ("p99", ADDED_P99_GOAL_MS)):
            worst = max(added_ms(ours, level, f"{part}_{percent}_ms") or 0.0 for part in ("first", "late"))
            name = f"minus added {percent} at {level.name}, ms, the worse of first content and end"
            found.append(Goal(name, -goal, -worst, worst <= goal))
    bad = sum(run["wrong"] + run["failed"] for runs in ours.runs.values() for run in runs)
    found.append(Goal("minus streams of ours with lost, doubled or other tokens", 0, -bad, bad == 0))
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


def added_ms(one: Contender, level: Level, key: str) -> float | None:
    """Median over repeats of a front's percentile less the same percentile of its backend; None without the latter."""
    direct = one.direct_runs.get(level, [])
    return median(run[key] - base[key] for run, base in zip(one.runs[level], direct, strict=False))


def median(values: Iterable[float]) -> float | None:
    """None of nothing."""
    listed = list(values)
    return statistics.median(listed) if listed else None
