"""Draws the sections of report.html from the figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, TypeVar

from paceline.report.acceptance import acceptance_charts
from paceline.report.charts import (
    Series,
    duration,
    empty,
    legend,
    line_chart,
    number,
    running_mean,
    stacked_columns,
)
from paceline.report.exactness import exactness_chart
from paceline.report.health import health_sections
from paceline.report.journal import ACCURACY, RunHistory
from paceline.report.measures import LENGTHS, REWARD, SPEED, lines
from paceline.report.mismatch import mismatch_sections
from paceline.report.slots import SlotInterval
from paceline.report.spans import Edge, SpanRecord
from paceline.report.summary import Summary
from paceline.report.timelines import Bar, timeline, waterfall
from paceline.streams.journal_line import IdleCause, SlotUse
from paceline.v1.coordinator_pb2 import StepRecord

HOLDERS = {"engine": "c0", "policy": "c1", "drafter": "c2", "none": "c7"}
_HOLDER_NAMES = {
    "engine": "rollout engine",
    "policy": "policy step",
    "drafter": "drafter training",
    "none": "idle",
}
_SERVICE_COLORS = {
    "coordinator": "c4",
    "gateway": "c0",
    "policy_trainer": "c1",
    "drafter_trainer": "c2",
}
T = TypeVar("T")

_IDLE = {
    IdleCause.UNTRAINED: "no drafter was to be trained",
    IdleCause.TRAINER_AWAY: "its trainer was away",
    IdleCause.TRAINER_DONE: "it had learned what there was",
    IdleCause.COMMIT: "a set was committed",
    IdleCause.ENOUGH: "it had as many as it may",
    IdleCause.GIVING_BACK: "it was giving its own back",
    IdleCause.SERIAL: "its turn was after the policy's step",
    IdleCause.HAND_OVER: "all rollouts were done, the policy was next",
    IdleCause.TOO_FEW: "too few workers were released",
    IdleCause.LEASING: "they were about to be leased",
}
_SMOOTH = 10
_ZOOM_STEPS = 3
_WATERFALL_ROWS = 32


def chart_sections(history: RunHistory) -> list[tuple[str, str, str]]:
    """(title, note, drawing) of the charts by RL step."""
    records = history.records
    learning = f"line: mean of {_SMOOTH} steps; dots: fixed held-out prompts"
    return [
        ("Reward and held-out accuracy", learning, _learning(history)),
        *_reward_parts(records),
        *acceptance_charts(history),
        (SPEED.title, SPEED.note, _speed(records)),
        ("Arms chosen", "share of speculation rounds by arm", _arms(records)),
        (LENGTHS[0].title, "tokens of a response", lines(records, LENGTHS)),
        ("Where a step's time went", "wall seconds of each step", _step_time(records)),
        ("What the slots did", "slot-seconds of each step by use", _slot_uses(records)),
        ("Drafter training", "whole optimiser steps inside each RL step", _drafter_steps(records)),
        *health_sections(records),
        *mismatch_sections(records),
        exactness_chart(records),
    ]


def slot_sections(history: RunHistory) -> str:
    """The whole run's slot timeline, and a zoom on some steps."""
    if not history.intervals:
        return empty("no slot was ever leased")
    rows = [f"slot {i}" for i in range(history.slots)]
    start, end = history.intervals[0].start_s, history.ended_s
    whole = timeline(
        rows, _bars(history.intervals), start, end, titles=False, label="slots over the whole run"
    )
    shown = legend([(_HOLDER_NAMES[name], color) for name, color in HOLDERS.items()]) + whole
    windows = _zoom(history)
    if windows:
        first, last = windows[0], windows[-1]
        zoomed = timeline(
            rows,
            _bars(history.intervals),
            first.start_s,
            last.end_s,
            titles=True,
            label="slots in some steps",
        )
        shown += f"<h3>Steps {first.step + 1} to {last.step + 1}</h3>{zoomed}"

    return shown


def latency_table(edges: Sequence[Edge]) -> str:
    """One row per edge between services."""
    if not edges:
        return empty("no spans were written")
    head = "".join(f"<th>{name}</th>" for name in ("edge", "call or hop", "over"))
    head += "".join(f'<th class="n">{name}</th>' for name in ("count", "p50", "p95", "p99"))
    ordered = sorted(edges, key=lambda edge: (edge.transport, edge.source, edge.target, edge.what))
    rows = "".join(_edge_row(edge) for edge in ordered)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def trace_section(trace: Sequence[SpanRecord]) -> str:
    """One trace from task to optimiser step to drafter step. The longest of many equal spans
    represents all.
    """
    rows = waterfall_rows(trace)
    if not rows:
        return empty("no trace was written")
    origin = min(span.start_ns for span, _, _ in rows)
    labels = [
        f"{'  ' * depth}{span.name}{f' ×{count}' if count > 1 else ''}  ·  {span.service}"
        for span, count, depth in rows
    ]
    bars = [
        Bar(
            i,
            (span.start_ns - origin) / 1e9,
            (span.end_ns - origin) / 1e9,
            _SERVICE_COLORS.get(span.service, "c5"),
            ", ".join(f"{key}={value}" for key, value in list(span.attributes.items())[:8]),
        )
        for i, (span, _, _) in enumerate(rows)
    ]
    named = [(name.replace("_", " "), color) for name, color in _SERVICE_COLORS.items()]
    return legend(named) + waterfall(labels, bars, label="one RL step as a trace")


def waterfall_rows(trace: Sequence[SpanRecord]) -> list[tuple[SpanRecord, int, int]]:
    """(span, number of represented spans, depth below the root) in the order of their start."""
    groups: dict[tuple[str, str], list[SpanRecord]] = {}
    for span in trace:
        groups.setdefault((span.service, span.name), []).append(span)
    chosen = [
        (max(group, key=lambda span: span.duration_s), len(group)) for group in groups.values()
    ]
    chosen = sorted(chosen, key=lambda pair: -pair[0].duration_s)[:_WATERFALL_ROWS]
    parents = {span.span_id: span.parent_id for span in trace}
    return [
        (span, count, _depth(span.span_id, parents))
        for span, count in sorted(chosen, key=lambda p: p[0].start_ns)
    ]


def counts_table(summary: Summary) -> str:
    """Ledger, versions and provenance as two columns."""
    rows: list[tuple[str, Any]] = [
        ("trajectories published", summary["trajectories_published"]),
        ("trained", summary["trajectories_trained"]),
        ("dropped", _counted(summary["trajectories_dropped"])),
        ("never final", _counted(summary["trajectories_unpublished"])),
        ("still open", summary["trajectories_open"]),
        ("lost", summary["trajectories_lost"]),
        ("policy versions served", summary["policy_versions"]),
        ("drafter versions served", summary["drafter_versions"]),
        ("drafter optimiser steps", summary["drafter_steps"]),
        ("drafter's tokens per slot-second", figure(summary["drafter_tokens_per_slot_s"], 0)),
        ("from a lease to its first step", _seconds(summary["drafter_first_step_s"])),
        ("gate decisions", _counted(summary["gate_decisions"])),
        ("samples without a reward", _counted(summary["samples_unscored"])),
        ("samples with a near-tie draw", summary["near_ties"]),
        ("slot-seconds", _uses(summary)),
        ("idle ones by cause", _idle(summary)),
        ("wait for a drafter-held slot", _percent(summary["preempt_wait_share"])),
        ("trace shown", summary["trace_id"]),
        ("processes", ", ".join(f"{name} {pid}" for name, pid in summary["pids"].items())),
        ("versions", ", ".join(f"{name} {one}" for name, one in summary["versions"].items())),
        *((f"sha256 of {name}", value) for name, value in summary["sha256"].items()),
    ]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td class='w'>{escape(str(value))}</td></tr>"
        for name, value in rows
    )
    return f"<table class='facts'><tbody>{cells}</tbody></table>"


def _uses(summary: Summary) -> str:
    """Shares of the slots' time, and their sum."""
    used, wall_s = summary["slot_s"], summary["slot_wall_s"]
    if not wall_s:
        return "not measured"
    shares = [f"{use} {seconds / wall_s:.1%}" for use, seconds in used.items()]
    return f"{', '.join(shares)}; together {sum(used.values()) / wall_s:.1%} of slots times wall"


def _idle(summary: Summary) -> str:
    """Reasons for idle slots without drafter training."""
    causes = sorted(summary["idle_s"].items(), key=lambda one: -one[1])
    return ", ".join(f"{_IDLE[cause]} {duration(s)}" for cause, s in causes if s) or "none"


def figure(value: float | None, digits: int) -> str:
    """A number, or a dash if it was not measured."""
    return "–" if value is None else f"{value:,.{digits}f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else duration(value)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "0"


def _edge_row(edge: Edge) -> str:
    words = (f"{edge.source} → {edge.target}", edge.what, edge.transport)
    figures = (f"{edge.count:,}", duration(edge.p50_s), duration(edge.p95_s), duration(edge.p99_s))
    cells = [f"<td>{escape(word)}</td>" for word in words] + [
        f'<td class="n">{figure}</td>' for figure in figures
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _by_step(
    records: Sequence[StepRecord], value: Callable[[StepRecord], T]
) -> list[tuple[float, T]]:
    """(finished steps, value) of each step."""
    return [(float(record.step + 1), value(record)) for record in records]


def _learning(history: RunHistory) -> str:
    rewards = REWARD.points(history.records)
    accuracy = [(float(step), value) for step, value in history.evaluated(ACCURACY)]
    widest = history.widest_pass
    passed = [(float(step), value) for step, value in history.evaluated(widest)]
    return line_chart(
        [
            Series("reward of a step", rewards, "c0", faint=True),
            Series("reward", running_mean(rewards, _SMOOTH), "c0"),
            Series("held-out accuracy", accuracy, "c1", dots=True),
            *([Series(f"held-out {widest}", passed, "c2", dots=True)] if passed else []),
        ],
        y_label="reward and accuracy",
        y_min=0.0,
        y_max=1.0,
    )


def _reward_parts(records: Sequence[StepRecord]) -> list[tuple[str, str, str]]:
    """The section of a mixture's rules, if rewards were mixed."""
    names = sorted({part for record in records for part in record.reward_parts})
    series = []
    for index, part in enumerate(names):
        values = [
            (float(one.step + 1), one.reward_parts[part])
            for one in records
            if part in one.reward_parts
        ]
        series.append(Series(part, running_mean(values, _SMOOTH), f"c{index % 7}"))
    note = f"each rule of the mixture before its weight, mean of {_SMOOTH} steps"
    chart = line_chart(series, y_label="reward")
    return [("Parts of the reward", note, chart)] if names else []


def _speed(records: Sequence[StepRecord]) -> str:
    speed = SPEED.points(records)
    finite = [(x, y) for x, y in speed if y == y]
    series = [
        Series(SPEED.label, speed, "c0", faint=True),
        Series("tokens/s", running_mean(finite, _SMOOTH), "c0"),
    ]
    return line_chart(series, y_label=SPEED.unit, y_min=SPEED.y_min)


def _arms(records: Sequence[StepRecord]) -> str:
    totals: Counter[str] = Counter()
    for record in records:
        totals.update(record.arm_rounds)
    names = sorted(totals, key=lambda arm: (arm != "off", arm))[:7]

    def shares(record: StepRecord) -> list[float]:
        rounds = dict(record.arm_rounds)
        return [rounds.get(arm, 0) / sum(rounds.values()) for arm in names]

    columns = _by_step([record for record in records if sum(record.arm_rounds.values())], shares)
    drafting = [name for name in names if name != "off"]  # in the colours of acceptance by arm
    colors = ["c7" if name == "off" else f"c{drafting.index(name)}" for name in names]
    return stacked_columns(names, columns, colors=colors, y_label="share of rounds")


def _step_time(records: Sequence[StepRecord]) -> str:
    def parts(record: StepRecord) -> list[float]:
        known = [record.rollout_s, record.policy_s, record.preempt_wait_s]
        return [*known, max(0.0, record.step_s - sum(known))]

    return stacked_columns(
        ["rollout", "policy step", "waiting for the drafter", "rest"],
        _by_step(records, parts),
        colors=["c0", "c1", "c5", "c7"],
        y_label="seconds",
    )


def _slot_uses(records: Sequence[StepRecord]) -> str:
    return stacked_columns(
        list(SlotUse),
        _by_step(records, lambda record: [record.slot_s[use] for use in SlotUse]),
        colors=["c0", "c1", "c2", "c5", "c7"],
        y_label="slot-seconds",
    )


def _drafter_steps(records: Sequence[StepRecord]) -> str:
    columns = _by_step(records, lambda record: [float(record.drafter_steps)])
    if not any(parts[0] for _, parts in columns):
        return empty("the drafter was not trained in this run")
    return stacked_columns(["optimiser steps"], columns, colors=["c2"], y_label="optimiser steps")


def _bars(intervals: Iterable[SlotInterval]) -> Iterable[Bar]:
    for one in intervals:
        name = _HOLDER_NAMES.get(one.holder, one.holder)
        title = f"{name}, {duration(one.seconds)}, epoch {one.epoch}, step {one.step + 1}"
        yield Bar(one.slot, one.start_s, one.end_s, HOLDERS.get(one.holder, "c5"), title, name)


def _zoom(history: RunHistory) -> list[Any]:
    """A few adjacent steps in the later half, in which the drafter held slots longest."""
    held = {record.step: record.drafter_slot_s for record in history.records}
    windows = list(history.windows)
    choices = range(len(windows) // 2, max(len(windows) // 2 + 1, len(windows) - _ZOOM_STEPS + 1))
    best = max(
        choices,
        key=lambda i: sum(held.get(w.step, 0.0) for w in windows[i : i + _ZOOM_STEPS]),
        default=0,
    )
    return windows[best : best + _ZOOM_STEPS]


def _depth(span_id: str, parents: dict[str, str]) -> int:
    depth = 0
    while (span_id := parents.get(span_id, "")) in parents and depth < 8:
        depth += 1
    return depth


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{number(share * 100)} % of step time"
