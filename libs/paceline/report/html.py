"""Renders the pages about a run: report.html, which loads nothing, and the content of the live
page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from paceline.report import charts, journal, slots, tables
from paceline.report.figures import Chart, run_charts
from paceline.report.samples import ShownSample, samples_note, samples_section
from paceline.report.spans import SpanRecord, SpanReport
from paceline.report.summary import Summary

_HOLDERS = {
    "engine": ("rollout engine", "c0"),
    "policy": ("policy step", "c1"),
    "drafter": ("drafter training", "c2"),
    "none": ("idle", "c7"),
}
_SERVICES = {
    "coordinator": "c4",
    "gateway": "c0",
    "policy_trainer": "c1",
    "drafter_trainer": "c2",
}
_ZOOM_STEPS = 3
_WATERFALL_ROWS = 32


def render(
    summary: Summary,
    history: journal.RunHistory,
    spans: SpanReport,
    samples: Sequence[ShownSample] = (),
) -> str:
    """The page; it loads nothing from outside."""
    shown = content(summary, history, spans, samples)
    return whole_page(f"Paceline run {summary['run_id']}", f"<main>{shown}</main>")


def whole_page(title: str, body: str) -> str:
    """A page including style and script; `body` is markup."""
    style, script = f"<style>{style_sheet()}</style>", f"<script>{tips_script()}</script>"
    return document(title, style, body + script)


def style_sheet() -> str:
    """Colours and layout of the pages."""
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def tips_script() -> str:
    """A script for the end of a page that shows the values under a pointer or a finger."""
    return Path(__file__).with_name("tips.js").read_text(encoding="utf-8")


def document(title: str, head: str, body: str) -> str:
    """A page; `head` and `body` are markup."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{head}</head><body>{body}</body></html>"
    )


def content(
    summary: Summary,
    history: journal.RunHistory,
    spans: SpanReport,
    samples: Sequence[ShownSample] = (),
) -> str:
    """All sections about a run, as markup."""
    left_out = f"; {spans.left_out:,} callers left out" if spans.left_out else ""
    wide = (
        (
            "Slots",
            "holder of each slot, over the whole run and in a few steps",
            _slot_section(history),
        ),
        (
            "Exactness audit by path",
            "tokens scored again by the trainer in the policy version that drew them",
            tables.exactness_table(history),
        ),
        (
            "Acceptance by drafter version and arm",
            "rollouts of the steps that a version served, newest version first, and the gate's "
            "projection for a chain of as many drafts",
            tables.acceptance_table(history),
        ),
        (
            "The drafter's gate",
            "newest decisions: candidate against the drafter that served",
            tables.gate_table(history.gate),
        ),
        ("Samples", samples_note(samples), samples_section(samples)),
        (
            "Latency between services",
            "gRPC: as the caller measures it, streams to their end; Redis: from append to read. "
            f"{charts.number(spans.spans)} spans read{left_out}",
            tables.latency_table(spans.edges),
        ),
        (
            "One RL step as a trace",
            "from task to optimiser step to drafter step",
            _trace_section(spans.trace),
        ),
        ("Counts and provenance", "trajectories by fate, from Redis", tables.counts_table(summary)),
    )
    seconds, machine = charts.duration(summary["wall_s"]), escape(summary["machine"])
    return (
        f"<h1>Run {escape(summary['run_id'])}</h1>"
        f'<p class="note">{summary["steps"]} RL steps in {seconds} on {machine}</p>'
        f'<div class="tiles">{_tiles(summary)}</div>'
        f'<div class="grid">{cards(run_charts(history))}</div>{cards(wide, "card wide-card")}'
    )


def cards(parts: Iterable[Chart], kind: str = "card") -> str:
    """Parts of a page: title, note, and a body in markup."""
    return "".join(
        f'<section class="{kind}"><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>'
        f"{body}</section>"
        for title, note, body in parts
    )


def _tiles(summary: Summary) -> str:
    idle, lost = charts.duration(summary["idle_slot_s"]), summary["trajectories_lost"]
    tiles = (
        (_change(summary, "accuracy", 2), "held-out accuracy, start to end"),
        (_change(summary, "reward", 2), "reward, first and last 10 steps"),
        (_change(summary, "accept_len", 2), "acceptance length, fixed probe"),
        (tables.figure(summary["tokens_per_s"], 0), "rollout tokens per second"),
        (
            charts.duration(summary["drafter_train_slot_s"]),
            f"of slot time trained the drafter; {idle} stayed idle",
        ),
        (str(lost), f"of {summary['trajectories_published']:,} trajectories lost"),
    )
    return "".join(
        f'<div class="tile{" bad" if lost and value == str(lost) else ""}"><b>{value}</b>'
        f"<span>{escape(words)}</span></div>"
        for value, words in tiles
    )


def _change(summary: Summary, name: str, digits: int) -> str:
    first, last = summary[f"{name}_first"], summary[f"{name}_last"]
    return f"<small>{tables.figure(first, digits)} →</small> {tables.figure(last, digits)}"


def _slot_section(history: journal.RunHistory) -> str:
    """The whole run's slot timeline, and a zoom on some steps."""
    if not history.intervals:
        return charts.empty("no slot was ever leased")
    rows = [f"slot {i}" for i in range(history.slots)]
    bars = [_bar(one) for one in history.intervals]
    start_s, end_s = history.intervals[0].start_s, history.ended_s
    name = "slots over the whole run"
    shown = charts.legend(list(_HOLDERS.values())) + charts.timeline(
        rows, bars, start_s, end_s, titles=False, label=name
    )
    if windows := _zoom(history):
        first, last = windows[0], windows[-1]
        zoomed = charts.timeline(
            rows, bars, first.start_s, last.end_s, titles=True, label="slots in some steps"
        )
        shown += f"<h3>Steps {first.step + 1} to {last.step + 1}</h3>{zoomed}"
    return shown


def _bar(one: slots.SlotInterval) -> charts.Bar:
    name, color = _HOLDERS.get(one.holder, (one.holder, "c5"))
    title = f"{name}, {charts.duration(one.seconds)}, epoch {one.epoch}, step {one.step + 1}"
    return charts.Bar(one.slot, one.start_s, one.end_s, color, title, name)


def _zoom(history: journal.RunHistory) -> Sequence[slots.StepWindow]:
    """A few adjacent steps in the later half, in which the drafter held slots longest."""
    held = {record.step: record.drafter_slot_s for record in history.records}
    windows, half = history.windows, len(history.windows) // 2
    best = max(
        range(half, max(half + 1, len(windows) - _ZOOM_STEPS + 1)),
        key=lambda i: sum(held.get(w.step, 0.0) for w in windows[i : i + _ZOOM_STEPS]),
    )
    return windows[best : best + _ZOOM_STEPS]


def _trace_section(trace: Sequence[SpanRecord]) -> str:
    """One trace from task to optimiser step to drafter step. The longest of many equal spans
    represents all.
    """
    rows = waterfall_rows(trace)
    if not rows:
        return charts.empty("no trace was written")
    origin, labels, bars = min(span.start_ns for span, _, _ in rows), [], []
    for i, (span, count, depth) in enumerate(rows):
        many = f" ×{count}" if count > 1 else ""
        labels.append(f"{'  ' * depth}{span.name}{many}  ·  {span.service}")
        began_s, ended_s = (span.start_ns - origin) / 1e9, (span.end_ns - origin) / 1e9
        title = ", ".join(f"{key}={value}" for key, value in list(span.attributes.items())[:8])
        bars.append(charts.Bar(i, began_s, ended_s, _SERVICES.get(span.service, "c5"), title))
    named = [(name.replace("_", " "), color) for name, color in _SERVICES.items()]
    return charts.legend(named) + charts.waterfall(labels, bars, label="one RL step as a trace")


def waterfall_rows(trace: Sequence[SpanRecord]) -> list[tuple[SpanRecord, int, int]]:
    """(span, number of represented spans, depth below the root) in the order of their start."""
    groups: dict[tuple[str, str], list[SpanRecord]] = {}
    for span in trace:
        groups.setdefault((span.service, span.name), []).append(span)
    chosen = [(max(one, key=lambda span: span.duration_s), len(one)) for one in groups.values()]
    longest = sorted(chosen, key=lambda pair: -pair[0].duration_s)[:_WATERFALL_ROWS]
    parents = {span.span_id: span.parent_id for span in trace}
    return [
        (span, count, _depth(span.span_id, parents))
        for span, count in sorted(longest, key=lambda pair: pair[0].start_ns)
    ]


def _depth(span_id: str, parents: dict[str, str]) -> int:
    depth = 0
    while (span_id := parents.get(span_id, "")) in parents and depth < 8:
        depth += 1
    return depth
