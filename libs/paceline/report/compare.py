"""Draws runs side by side: one line a run in every chart, one column a run in the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from paceline.report.charts import Series, duration, line_chart, running_mean
from paceline.report.html import card, document, style_sheet
from paceline.report.journal import ACCURACY, PROBE, RunHistory
from paceline.report.sections import figure
from paceline.report.summary import Summary, ratio
from paceline.v1.coordinator_pb2 import StepRecord

COLORS = 7
"""Runs that can be told apart."""
_SMOOTH = 5
_NAN = float("nan")


class ComparedRun(NamedTuple):
    """One of the runs."""

    summary: Summary
    history: RunHistory


Measure = Callable[[StepRecord], float]
_BY_STEP: tuple[tuple[str, str, Measure], ...] = (
    ("Reward", "mean of a step", lambda one: one.reward_mean),
    (
        "Rollout speed",
        "tokens per second of rollout",
        lambda one: ratio(one.response_tokens, one.rollout_s) or _NAN,
    ),
    ("Acceptance length", "live", lambda one: one.accept_length or _NAN),
    ("Seconds of a step", "evaluations excluded", lambda one: one.step_s),
    ("Entropy", "nats a token", lambda one: one.policy.get("entropy", _NAN)),
    (
        "Response length",
        "longest, tokens",
        lambda one: float(max(one.response_length_quantiles, default=0)),
    ),
)
"""(title, note, value of a step)."""
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
    """The page about several runs, by name; it loads nothing from anywhere."""
    charts = "".join(card("card", title, note, drawing) for title, note, drawing in _sections(runs))
    names = ", ".join(runs)
    body = (
        f"<main><h1>{escape(names)}</h1>"
        f"{card('card wide-card', 'Figures', 'a column for each run', _table(runs))}"
        f'<div class="grid spaced">{charts}</div></main>'
    )
    return document(f"Paceline runs {names}", f"<style>{style_sheet()}</style>", body)


def figures(runs: Mapping[str, ComparedRun]) -> list[tuple[str, ...]]:
    """Rows of the table: what is told, then it for each run."""
    return [(what, *(told(one.summary) for one in runs.values())) for what, told in _FIGURES]


def _sections(runs: Mapping[str, ComparedRun]) -> list[tuple[str, str, str]]:
    found = [
        (title, f"{note}; mean of {_SMOOTH} steps", _by_step(runs, measure))
        for title, note, measure in _BY_STEP
    ]
    return found + [
        (title, "by the steps finished", _evaluated(runs, kind)) for kind, title in _EVALUATED
    ]


def _by_step(runs: Mapping[str, ComparedRun], measure: Measure) -> str:
    points = {
        name: [
            (float(one.step + 1), value)
            for one in run.history.records
            if math.isfinite(value := measure(one))
        ]
        for name, run in runs.items()
    }
    return _chart({name: running_mean(of, _SMOOTH) for name, of in points.items()})


def _evaluated(runs: Mapping[str, ComparedRun], kind: str) -> str:
    points = {
        name: [(float(step), value) for step, value in run.history.evaluated(kind)]
        for name, run in runs.items()
    }
    return _chart(points, dots=True)


def _chart(points: Mapping[str, Sequence[tuple[float, float]]], *, dots: bool = False) -> str:
    lines = [
        Series(name, of, f"c{number}", dots=dots)
        for number, (name, of) in enumerate(points.items())
    ]
    return line_chart(lines, y_label="by RL step")


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
