"""Runs side by side."""

from __future__ import annotations

import math
import re

import pytest

from paceline.report.compare import ComparedRun, comparison, figures
from paceline.report.figures import AGE, MISMATCH, SIDE_BY_SIDE, SOLVED_BY_ALL, SPEED
from paceline.report.journal import RunHistory
from paceline.report.spans import SpanReport
from paceline.report.summary import summarize
from paceline.streams import LedgerCount
from paceline.v1.coordinator_pb2 import StepRecord

LEARNING = ("loss", "entropy", "divergence", "grad_norm")


def run(history: RunHistory, name: str) -> ComparedRun:
    """With every figure that a step may measure."""
    for record in history.records:
        record.policy.update(dict.fromkeys((*LEARNING, *MISMATCH), 0.5 + 0.01 * record.step))
        record.staleness.update({"0": 3, "2": 1})
    ledger = LedgerCount(3840, 3840, {}, 0, 0)
    return ComparedRun(summarize(name, history, ledger, SpanReport(), {}, {}), history)


def test_every_run_has_a_line_in_every_chart_and_a_column_in_the_table(history: RunHistory) -> None:
    page = comparison({"a": run(history, "a"), "b<": run(history, "b<")})
    titles = [one.title for one in SIDE_BY_SIDE]
    assert len(set(titles)) == len(titles)
    for title in (*titles, "Held-out accuracy"):
        chart = page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
        assert re.findall(r'class="line (c\d)', chart) == ["c0", "c1"], title
        assert ">a</span>" in chart
        assert ">b&lt;</span>" in chart
    assert page.count('<th class="n">') == 2
    assert "<b<" not in page


@pytest.mark.parametrize("title", ["Loss", "Entropy", "Divergence", "Gradient norm", "Staleness"])
def test_a_run_that_did_not_measure_a_figure_has_no_line_beside_one_that_did(
    history: RunHistory, title: str
) -> None:
    bare = RunHistory([StepRecord(step=i) for i in range(5)], began_s=5, ended_s=6)
    other = ComparedRun(run(history, "b").summary, bare)
    page = comparison({"a": run(history, "a"), "b": other})
    chart = page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
    assert re.findall(r'class="line (c\d)', chart) == ["c0"]


def test_shares_and_means_of_a_step_are_of_what_it_counted() -> None:
    step = StepRecord(
        groups_solved={"by_none": 1, "by_all": 3}, staleness={"0": 1, "2": 3}, response_tokens=9
    )
    assert (SOLVED_BY_ALL.of(step), AGE.of(step)) == (0.75, 1.5)
    assert all(math.isnan(one.of(StepRecord())) for one in (SOLVED_BY_ALL, AGE, SPEED))


def test_the_page_of_several_runs_loads_nothing(history: RunHistory) -> None:
    page = comparison({"a": run(history, "a"), "b": run(history, "b")})
    assert not re.search(r"https?://|src=|href=|@import|url\(|<link|fetch", page)


def test_a_figure_that_one_run_has_not_measured_is_a_dash(history: RunHistory) -> None:
    other = run(history, "b")
    other.summary["accuracy_last"] = None
    rows = {row[0]: row[1:] for row in figures({"a": run(history, "a"), "b": other})}
    assert rows["held-out accuracy at the end"][1] == "–"
    assert rows["RL steps"][0] == rows["RL steps"][1]
