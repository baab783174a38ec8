"""Draws runs side by side: one line per run in each chart, one column per run in the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape
from typing import NamedTuple

from paceline.report.charts import Series, duration, line_chart, running_mean
from paceline.report.html import card, whole_page
from paceline.report.journal import ACCURACY, PROBE, RunHistory
from paceline.report.measures import SIDE_BY_SIDE, Measure
from paceline.report.sections import figure
from paceline.report.summary import Summary

COLORS = 7
"""Runs that can be told apart."""
_SMOOTH = 5


class ComparedRun(NamedTuple):
    """One of the runs."""

    summary: Summary
    history: RunHistory


_EVALUATED = ((ACCURACY, "Held-out accuracy"), (PROBE, "Acceptance length of the probe"))
_FIGURES: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("RL steps", lambda one: str(one["steps"])),
    ("wall time", lambda one: duration(one["wall_s"])),
    ("reward, last 10 steps", lambda one: figure(one["reward_last"], 3)),
    ("held-out accuracy at the end", lambda one: figure(one["accuracy_last"], 3)),
    ("acceptance length at the end", lambda one: figure(one["accept_len_last"], 2)),
    ("rollout tokens/s, last 20 steps", lambda one: figure(one["tokens_per_s_last"], 0)),
    ("drafter steps per RL step", lambda one: figure(one["drafter_steps_per_rl_step"], 1)),
    ("trajectories lost", lambda one: str(one["trajectories_lost"])),
)


def comparison(runs: Mapping[str, ComparedRun]) -> str:
    """The page about several runs, by name. It loads nothing from outside."""
    charts = "".join(card("card", title, note, drawing) for title, note, drawing in _sections(runs))
    names = ", ".join(runs)
    body = (
        f"<main><h1>{escape(names)}</h1>"
        f"{card('card wide-card', 'Figures', 'a column for each run', _table(runs))}"
        f'<div class="grid spaced">{charts}</div></main>'
    )
    return whole_page(f"Paceline runs {names}", body)


def figures(runs: Mapping[str, ComparedRun]) -> list[tuple[str, ...]]:
    """Rows of the table: the name of a figure, then its value for each run."""
    return [(what, *(told(one.summary) for one in runs.values())) for what, told in _FIGURES]


def _sections(runs: Mapping[str, ComparedRun]) -> list[tuple[str, str, str]]:
    found = [
        (one.title, f"{one.note}; mean of {_SMOOTH} steps", _by_step(runs, one))
        for one in SIDE_BY_SIDE
    ]
    return found + [
        (title, "by the steps finished", _evaluated(runs, kind)) for kind, title in _EVALUATED
    ]


def _by_step(runs: Mapping[str, ComparedRun], measure: Measure) -> str:
    """A line for each run. Steps without a measurement do not count in means."""
    lines = []
    for number, (name, run) in enumerate(runs.items()):
        known = [(x, y) for x, y in measure.points(run.history.records) if math.isfinite(y)]
        lines.append(Series(name, running_mean(known, _SMOOTH), f"c{number}"))
    return line_chart(lines, y_label=measure.unit, y_min=measure.y_min, y_max=measure.y_max)


def _evaluated(runs: Mapping[str, ComparedRun], kind: str) -> str:
    lines = []
    for number, (name, run) in enumerate(runs.items()):
        points = [(float(step), value) for step, value in run.history.evaluated(kind)]
        lines.append(Series(name, points, f"c{number}", dots=True))
    return line_chart(lines, y_label="by the steps finished")


def _table(runs: Mapping[str, ComparedRun]) -> str:
    heads = "".join(f'<th class="n">{escape(name)}</th>' for name in ("", *runs))
    rows = "".join(
        "<tr>" + "".join(_cell(number, text) for number, text in enumerate(row)) + "</tr>"
        for row in figures(runs)
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(number: int, text: str) -> str:
    kind = ' class="n"' if number else ""
    return f"<td{kind}>{escape(text)}</td>"
