"""Renders the pages about a run: report.html, which loads nothing, and the content of the live
page.
"""

import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.report import charts, figures, journal, tables
from paceline.report.samples import ShownSample
from paceline.report.summary import Summary

_FOLDER = Path(__file__).parent
_HOLDERS = {
    "engine": ("rollout engine", "c0"),
    "policy": ("policy step", "c1"),
    "drafter": ("drafter training", "c2"),
    "none": ("idle", "c7"),
}
_ZOOM_STEPS = 3


def show_value(value: Any) -> str:
    """A value of the summary as text; counts by name without the counts of 0."""
    if value is None:
        return "not measured"
    if isinstance(value, dict):
        shown = (
            f"{name.replace('_', ' ')} {show_value(one)}" for name, one in value.items() if one
        )
        return ", ".join(shown) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return charts.number(value) if isinstance(value, float) else str(value)


_MEANINGS = tomllib.loads((_FOLDER / "meanings.toml").read_text(encoding="utf-8"))


def meaning(name: str) -> str:
    """The meaning of a figure, chart or table by its title; empty for an unknown title. A number at
    the end of the title does not count.
    """
    return str(_MEANINGS.get(name.rstrip(" 0123456789"), ""))


charts.MARKUP.filters.update(figure=tables.figure, words=show_value, meaning=meaning)


def render(run_id: str, shown: str) -> str:
    """The page with this content; it loads nothing from outside."""
    head = f"<style>{read_asset('style.css')}</style>"
    body = f"<main>{shown}</main><script>{read_asset('tips.js')}</script>"
    return document(f"Paceline run {run_id}", head, body)


def read_asset(name: str) -> str:
    """style.css, the colours and layout of the pages; or tips.js, a script for the end of a page
    that shows the values under a pointer or a finger.
    """
    return (_FOLDER / name).read_text(encoding="utf-8")


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
    samples: Sequence[ShownSample] = (),
    other: figures.OtherRun | None = None,
) -> str:
    """All sections about a run, as markup; `other`: a run to show beside it."""
    shown = (
        tables.exactness_table(history),
        tables.acceptance_table(history),
        tables.gate_table(history.gate),
    )
    return charts.MARKUP.get_template("run.html").render(
        summary=summary,
        charts=[(one, one.draw(history, other)) for one in figures.CHARTS],
        compared=[tables.settings_table(other)] if other else [],
        tables=shown,
        holders=_HOLDERS.values(),
        timelines=_timelines(history),
        samples=samples,
    )


def _timelines(history: journal.RunHistory) -> list[tuple[str, str]]:
    """The slots over the whole run, and in a few steps: (title, drawing)."""
    if not history.intervals:
        return []
    bars = []
    for one in history.intervals:
        name, color = _HOLDERS.get(one.holder, (one.holder, "c5"))
        title = f"slot {one.slot}: {name}, {charts.duration(one.seconds)}, step {one.step + 1}"
        bars.append(charts.Bar(one.slot, one.start_s, one.end_s, color, title))
    spans = [("Whole run", (history.intervals[0].start_s, history.ended_s))]
    if windows := _chosen_windows(history):
        first, last = windows[0], windows[-1]
        ends = first.start_s, last.end_s
        spans.append((f"Steps {first.step + 1} to {last.step + 1}", ends))
    rows = [f"slot {i}" for i in range(history.slots)]
    return [(title, charts.timeline(rows, bars, *ends, title)) for title, ends in spans]


def _chosen_windows(history: journal.RunHistory) -> Sequence[journal.StepWindow]:
    """A few adjacent steps in the later half, in which the drafter held slots longest."""
    held = {record.step: record.drafter_slot_s for record in history.records}
    windows, half = history.windows, len(history.windows) // 2
    best = max(
        range(half, max(half + 1, len(windows) - _ZOOM_STEPS + 1)),
        key=lambda i: sum(held.get(w.step, 0.0) for w in windows[i : i + _ZOOM_STEPS]),
    )
    return windows[best : best + _ZOOM_STEPS]
