"""Tables and goals of the gateway's bench. Owns what is compared with what; measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.gateway.fronts import LITELLM, OURS
from benchmarks.gateway.load import percentile_ms
from benchmarks.gateway.measure import Contender, Level
from benchmarks.gateway.sessions import Held
from benchmarks.gateway.turns import CACHE, NO_CACHE, TurnRun
from benchmarks.paired import paired_ratio
from benchmarks.result import Goal, Row

ADDED_P50_GOAL_MS, ADDED_P99_GOAL_MS, TIMES_LITELLM_GOAL, CACHED_GOAL = 2.0, 10.0, 3.0, 0.9
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
"""Compared with the backend's: first content, and how long after the rounds of its response a
stream's end came.
"""


TURN_SECTION = "turns of agents, embedded engine, fp32"


def _later_first_ms(run: TurnRun, percent: int) -> float:
    value = percentile_ms([turn.first_s for turn in run.later], percent)
    assert value is not None
    return value


TURN_FIGURES: Mapping[str, Callable[[TurnRun], float]] = {
    "first token p50 ms": lambda run: _later_first_ms(run, 50),
    "first token p99 ms": lambda run: _later_first_ms(run, 99),
    "tokens/s": lambda run: run.rate,
}
"""Of each run of the dialogues; first tokens are those of turns with a turn before them."""


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
                row[key.removesuffix("_ms").replace("_", " ")] = median(
                    run[key] for run in one.runs[level]
                )
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
                    "load generator's core": f"{busy:.0%}"
                    + (" saturated" if busy > SATURATED else ""),
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


def turn_rows(runs: Mapping[str, Sequence[TurnRun]]) -> list[Row]:
    """What turns found in the cache and what came of it, by arm; then the first arm over the
    second, run by run.
    """
    if not runs:
        return []
    rows = [_turn_row(name, several, runs[CACHE]) for name, several in runs.items()]
    ratios = {
        figure: paired_ratio(
            [read(run) for run in runs[CACHE]], [read(run) for run in runs[NO_CACHE]]
        ).value
        for figure, read in TURN_FIGURES.items()
    }
    return [*rows, {"section": TURN_SECTION, "gateway": f"{CACHE} / {NO_CACHE}", **ratios}]


def _turn_row(name: str, runs: Sequence[TurnRun], reference: Sequence[TurnRun]) -> Row:
    """Shares and counts over all runs of an arm, medians of their figures; its tokens beside the
    reference's.
    """
    turns = [turn for run in runs for turn in run.turns]
    later = [turn for run in runs for turn in run.later]
    pairs = [
        pair
        for one, two in zip(runs, reference, strict=True)
        for pair in zip(one.dialogues, two.dialogues, strict=True)
    ]
    return {
        "section": TURN_SECTION,
        "gateway": name,
        "dialogues": len(pairs),
        "with other tokens": sum(
            [turn.tokens for turn in one] != [turn.tokens for turn in two] for one, two in pairs
        ),
        "prompt tokens a turn": sum(turn.prompt for turn in turns) / len(turns),
        "share cached": sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns),
        "turns that found all": sum(turn.cached >= turn.cacheable for turn in later) / len(later),
        **{figure: median(read(run) for run in runs) for figure, read in TURN_FIGURES.items()},
    }


def turn_goals(runs: Mapping[str, Sequence[TurnRun]]) -> list[Goal]:
    """How much of what the turn before had left computed was found."""
    later = [turn for run in runs.get(CACHE, ()) for turn in run.later]
    if not later:
        return []
    share = sum(turn.cached for turn in later) / sum(turn.cacheable for turn in later)
    name = "share found in the cache of what the turns before had left there"
    return [Goal(name, CACHED_GOAL, share, share >= CACHED_GOAL)]


def goals(
    contenders: Sequence[Contender], levels: Sequence[Level], held: Held | None
) -> list[Goal]:
    """Added latency, no token lost, sessions that answer, margin to LiteLLM.

    All are `at least`, hence signs.
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


def added_ms(one: Contender, level: Level, key: str) -> float | None:
    """Median over repeats of a front's percentile less the same percentile of its backend; None
    without the latter.
    """
    direct = one.direct_runs.get(level, [])
    return median(run[key] - base[key] for run, base in zip(one.runs[level], direct, strict=False))


def median(values: Iterable[float]) -> float | None:
    """None of nothing."""
    listed = list(values)
    return statistics.median(listed) if listed else None
