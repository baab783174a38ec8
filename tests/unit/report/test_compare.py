"""Runs side by side."""

from __future__ import annotations

import re

from paceline.report.compare import ComparedRun, comparison, figures
from paceline.report.journal import RunHistory
from paceline.report.spans import SpanReport
from paceline.report.summary import summarize
from paceline.streams import LedgerCount


def run(history: RunHistory, name: str) -> ComparedRun:
    ledger = LedgerCount(3840, 3840, {}, 0, 0)
    return ComparedRun(summarize(name, history, ledger, SpanReport(), {}, {}), history)


def test_every_run_has_a_line_in_every_chart_and_a_column_in_the_table(history: RunHistory) -> None:
    page = comparison({"a": run(history, "a"), "b<": run(history, "b<")})
    for title in ("Reward", "Rollout speed", "Held-out accuracy", "Seconds of a step"):
        chart = page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
        assert re.findall(r'class="line (c\d)', chart) == ["c0", "c1"], title
        assert ">a</span>" in chart
        assert ">b&lt;</span>" in chart
    assert page.count('<th class="n">') == 3
    assert "<b<" not in page


def test_the_page_of_several_runs_loads_nothing(history: RunHistory) -> None:
    page = comparison({"a": run(history, "a"), "b": run(history, "b")})
    assert not re.search(r"https?://|src=|href=|@import|url\(|<script|<link", page)


def test_a_figure_that_one_run_has_not_measured_is_a_dash(history: RunHistory) -> None:
    other = run(history, "b")
    other.summary["accuracy_last"] = None
    rows = {row[0]: row[1:] for row in figures({"a": run(history, "a"), "b": other})}
    assert rows["held-out accuracy at the end"][1] == "–"
    assert rows["RL steps"][0] == rows["RL steps"][1]
