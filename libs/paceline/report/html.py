"""Renders the pages about a run: report.html, which loads nothing, and the content of the live
page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.report.acceptance import acceptance_table
from paceline.report.charts import duration, number
from paceline.report.exactness import exactness_table
from paceline.report.gate_table import gate_table
from paceline.report.journal import RunHistory
from paceline.report.samples import ShownSample, samples_note, samples_section
from paceline.report.sections import (
    chart_sections,
    counts_table,
    figure,
    latency_table,
    slot_sections,
    trace_section,
)
from paceline.report.spans import SpanReport
from paceline.report.summary import Summary

_STYLE = Path(__file__).with_name("style.css")
_TIPS = Path(__file__).with_name("tips.js")


def render(
    summary: Summary, history: RunHistory, spans: SpanReport, samples: Sequence[ShownSample] = ()
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
    return _STYLE.read_text(encoding="utf-8")


def tips_script() -> str:
    """A script for the end of a page that shows the values under a pointer or a finger."""
    return _TIPS.read_text(encoding="utf-8")


def document(title: str, head: str, body: str) -> str:
    """A page; `head` and `body` are markup."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{head}</head><body>{body}</body></html>"
    )


def content(
    summary: Summary, history: RunHistory, spans: SpanReport, samples: Sequence[ShownSample] = ()
) -> str:
    """All sections about a run, as markup."""
    charts = "".join(
        card("card", title, note, drawing) for title, note, drawing in chart_sections(history)
    )
    wide = (
        (
            "Slots",
            "who computed on each slot, over the whole run and in a few steps",
            slot_sections(history),
        ),
        (
            "Exactness audit by path",
            "tokens scored again by the trainer in the policy version that drew them",
            exactness_table(history),
        ),
        (
            "Acceptance by drafter version and arm",
            "rollouts of the steps that a version served, newest version first, and what its gate "
            "had projected for a chain of so many drafts",
            acceptance_table(history),
        ),
        (
            "The drafter's gate",
            "newest decisions: candidate against the drafter that served",
            gate_table(history.gate),
        ),
        ("Samples", samples_note(samples), samples_section(samples)),
        ("Latency between services", _latency_note(spans), latency_table(spans.edges)),
        (
            "One RL step as a trace",
            "from task to optimiser step to drafter step",
            trace_section(spans.trace),
        ),
        ("Counts and provenance", "trajectories by fate, from Redis", counts_table(summary)),
    )
    sections = "".join(card("card wide-card", title, note, body) for title, note, body in wide)
    return (
        f'<h1>Run {escape(summary["run_id"])}</h1><p class="note">{escape(_subtitle(summary))}</p>'
        f'<div class="tiles">{_tiles(summary)}</div><div class="grid">{charts}</div>'
        f"{sections}"
    )


def _subtitle(summary: Summary) -> str:
    return f"{summary['steps']} RL steps in {duration(summary['wall_s'])} on {summary['machine']}"


def _tiles(summary: Summary) -> str:
    train, idle = summary["drafter_train_slot_s"], summary["idle_slot_s"]
    lost = summary["trajectories_lost"]
    return "".join(
        (
            _tile(_change(summary, "accuracy", 2), "held-out accuracy, start to end"),
            _tile(_change(summary, "reward", 2), "reward, first and last 10 steps"),
            _tile(_change(summary, "accept_len", 2), "acceptance length, fixed probe"),
            _tile(figure(summary["tokens_per_s"], 0), "rollout tokens per second"),
            _tile(
                duration(train),
                f"of slot time trained the drafter; {duration(idle)} stayed idle",
            ),
            _tile(
                str(lost),
                f"of {summary['trajectories_published']:,} trajectories lost",
                bad=lost > 0,
            ),
        )
    )


def _tile(figure: str, words: str, *, bad: bool = False) -> str:
    kind = "tile bad" if bad else "tile"
    return f'<div class="{kind}"><b>{figure}</b><span>{escape(words)}</span></div>'


def card(kind: str, title: str, note: str, body: str) -> str:
    """A part of a page; `body` is markup."""
    head = f'<h2>{escape(title)}</h2><p class="note">{escape(note)}</p>'
    return f'<section class="{kind}">{head}{body}</section>'


def _change(summary: Summary, name: str, digits: int) -> str:
    first, last = summary[f"{name}_first"], summary[f"{name}_last"]
    return f"<small>{figure(first, digits)} →</small> {figure(last, digits)}"


def _latency_note(spans: SpanReport) -> str:
    left_out = f"; {spans.left_out:,} callers left out" if spans.left_out else ""
    return (
        f"gRPC: as the caller sees it, streams to their end; Redis: from append to read. "
        f"{number(spans.spans)} spans read{left_out}"
    )
