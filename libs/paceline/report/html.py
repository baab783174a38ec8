"""report.html: one self-contained page about a run. Owns its layout and colours, no drawing and no figure."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from paceline.report.charts import duration, number
from paceline.report.journal import RunHistory
from paceline.report.sections import chart_sections, counts_table, latency_table, slot_sections, trace_section
from paceline.report.spans import SpanReport
from paceline.report.summary import Summary

_LIGHT = "--c0:#2f6fb8;--c1:#d97a1f;--c2:#23936a;--c3:#b0468c;--c4:#7a68c8;--c5:#c93a33;--c6:#3f9fbf;--c7:#cdd2d9;"
_DARK = "--c0:#6ba7ea;--c1:#f0a04b;--c2:#4cc394;--c3:#dd7ebc;--c4:#a79bee;--c5:#f0736b;--c6:#6cc7e2;--c7:#454c57;"
_STYLE = f"""
:root{{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1c2127;--soft:#5d6773;--rule:#e3e6ea;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{--bg:#14171b;--card:#1d2126;--ink:#e6e9ed;--soft:#9aa4b0;--rule:#2e343c;{_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:26px;margin:0}}h2{{font-size:17px;margin:0 0 2px}}h3{{font-size:14px;margin:14px 0 4px;color:var(--soft)}}
.note{{color:var(--soft);font-size:13px;margin:0 0 8px}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:14px;margin:20px 0}}
.card,.tile{{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;min-width:0}}
.tile b{{display:block;font-size:24px;font-weight:650;letter-spacing:-.01em}}.tile b small{{font-size:15px;color:var(--soft);font-weight:500}}
.tile span{{color:var(--soft);font-size:13px}}.tile.bad b{{color:var(--c5)}}
.grid{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:14px}}.wide-card{{margin-top:14px;overflow-x:auto}}
svg.chart{{width:100%;height:auto;display:block}}svg.wide{{min-width:860px}}
.tick{{font-size:11px;fill:var(--soft);font-family:inherit;white-space:pre}}.grid-line{{stroke:var(--rule)}}.axis{{stroke:var(--soft);fill:none}}
.mark{{stroke:var(--soft);stroke-dasharray:3 3;opacity:.55}}
.line{{fill:none;stroke-width:2;stroke-linejoin:round}}.faint{{opacity:.3;stroke-width:1}}
{"".join(f".fill.c{i},.dot.c{i}{{fill:var(--c{i})}}.line.c{i}{{stroke:var(--c{i})}}.key.c{i}{{background:var(--c{i})}}" for i in range(8))}
.legend{{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12.5px;color:var(--soft);margin-bottom:2px}}
.key{{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}}
table{{border-collapse:collapse;width:100%;font-size:13.5px}}th{{text-align:left;color:var(--soft);font-weight:500}}
th,td{{padding:5px 10px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}}.n{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
.facts td:first-child{{color:var(--soft);white-space:nowrap;width:1%;padding-right:24px}}.w{{overflow-wrap:anywhere}}.empty{{color:var(--soft);font-size:13px}}
"""


def write_report(path: Path, summary: Summary, history: RunHistory, spans: SpanReport) -> None:
    """Write the page whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render(summary, history, spans), encoding="utf-8")
    temporary.replace(path)


def render(summary: Summary, history: RunHistory, spans: SpanReport) -> str:
    """The page; it loads nothing from anywhere."""
    charts = "".join(
        f'<section class="card"><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{drawing}</section>'
        for title, note, drawing in chart_sections(history)
    )
    wide = (
        ("Slots", "who computed on each slot, over the whole run and in a few steps", slot_sections(history)),
        ("Latency between services", _latency_note(spans), latency_table(spans.edges)),
        ("One RL step as a trace", "from task to optimiser step to drafter step", trace_section(spans.trace)),
        ("Counts and provenance", "trajectories by fate, from Redis", counts_table(summary)),
    )
    sections = "".join(
        f'<section class="card wide-card"><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}</section>'
        for title, note, body in wide
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline run {escape(summary["run_id"])}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body><main>'
        f'<h1>Run {escape(summary["run_id"])}</h1><p class="note">{escape(_subtitle(summary))}</p>'
        f'<div class="tiles">{_tiles(summary)}</div><div class="grid">{charts}</div>{sections}</main></body></html>'
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
            _tile(_value(summary["tokens_per_s"], 0), "rollout tokens per second"),
            _tile(
                duration(train),
                f"of slot time trained the drafter; {duration(idle)} stayed idle",
            ),
            _tile(str(lost), f"of {summary['trajectories_published']:,} trajectories lost", bad=lost > 0),
        )
    )


def _tile(figure: str, words: str, *, bad: bool = False) -> str:
    return f'<div class="tile{" bad" if bad else ""}"><b>{figure}</b><span>{escape(words)}</span></div>'


def _change(summary: Summary, name: str, digits: int) -> str:
    first, last = summary[f"{name}_first"], summary[f"{name}_last"]
    return f"<small>{_value(first, digits)} →</small> {_value(last, digits)}"


def _value(value: Any, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _latency_note(spans: SpanReport) -> str:
    left_out = f"; {spans.left_out:,} callers left out" if spans.left_out else ""
    return (
        f"gRPC: as the caller sees it, streams to their end; Redis: from append to read. "
        f"{number(spans.spans)} spans read{left_out}"
    )
