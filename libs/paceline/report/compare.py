"""Draws runs side by side: one line per run in each chart, one column per run in the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import NamedTuple

from paceline.report.charts import Series, duration, line_chart, running_mean
from paceline.report.figures import SIDE_BY_SIDE, Chart, evaluated
from paceline.report.html import cards, whole_page
from paceline.report.journal import ACCURACY, PROBE, RunHistory
from paceline.report.summary import Summary
from paceline.report.tables import figure, table

COLORS = 7
"""Maximum number of runs, which differ by colour."""
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
    names, shown = ", ".join(runs), table(("", *runs), figures(runs), 1)
    head = cards([("Figures", "a column for each run", shown)], "card wide-card")
    body = f'<h1>{escape(names)}</h1>{head}<div class="grid spaced">{cards(_charts(runs))}</div>'
    return whole_page(f"Paceline runs {names}", f"<main>{body}</main>")


def figures(runs: Mapping[str, ComparedRun]) -> list[tuple[str, ...]]:
    """Rows of the table: the name of a figure, then its value for each run."""
    return [(name, *(of(one.summary) for one in runs.values())) for name, of in _FIGURES]


def _charts(runs: Mapping[str, ComparedRun]) -> Iterable[Chart]:
    for one in SIDE_BY_SIDE:
        series = [
            Series(name, running_mean(one.points(run.history.records), _SMOOTH), f"c{i}")
            for i, (name, run) in enumerate(runs.items())
        ]
        drawing = line_chart(series, y_label=one.unit, y_min=one.y_min, y_max=one.y_max)
        yield one.title, f"{one.note}; mean of {_SMOOTH} steps", drawing
    for kind, title in _EVALUATED:
        series = [
            Series(name, evaluated(run.history, kind), f"c{i}", dots=True)
            for i, (name, run) in enumerate(runs.items())
        ]
        yield title, "by the steps finished", line_chart(series, y_label="by the steps finished")
