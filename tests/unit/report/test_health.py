"""The charts of the policy's learning, and the details of a point."""

from __future__ import annotations

import re

import pytest

from paceline.report.charts import Series, line_chart
from paceline.report.figures import CHARTS
from paceline.report.journal import RunHistory
from paceline.v1.coordinator_pb2 import StepRecord


def record(step: int, **figures: float) -> StepRecord:
    return StepRecord(
        step=step,
        policy=figures,
        truncated_share=0.25,
        groups_solved={"by_none": 1, "by_some": 6, "by_all": 1},
        staleness={"0": 3, "2": 1} if step else {"0": 4},
    )


def drawing(records: list[StepRecord], title: str) -> str:
    return next(one for one in CHARTS if one.title == title).draw(RunHistory(records))


def test_each_figure_of_learning_has_its_chart() -> None:
    figures = {"loss": 0.5, "entropy": 1.25, "divergence": 0.01, "grad_norm": 2.0}
    records = [record(step, **figures) for step in range(5)]
    for title, told in (
        ("Loss", "loss: 0.5"),
        ("Entropy", "entropy: 1.25"),
        ("Divergence", "divergence: 0.01"),
        ("Gradient norm", "grad norm: 2"),
        ("Groups solved", "by none: 1"),
        ("Truncated responses", "truncated share: 0.25"),
        ("Staleness", "2: 1"),
    ):
        assert told in drawing(records, title), title


def test_what_a_run_did_not_measure_has_no_drawing() -> None:
    records = [StepRecord(step=0, staleness={"0": 4})]
    for title in ("Loss", "Entropy", "Divergence", "Gradient norm", "Groups solved"):
        assert drawing(records, title) == ""
    assert "0: 4" in drawing(records, "Staleness")


@pytest.mark.parametrize(("count", "lines"), [(1, 0), (2, 0), (3, 1)])
def test_no_line_is_drawn_through_fewer_than_three_measurements(count: int, lines: int) -> None:
    points = [(float(step), 0.5) for step in range(count)]
    chart = line_chart([Series("accuracy", points, "c1", dots=True)], y_label="accuracy")
    paths = re.findall(r'<path class="line c1" d="([^"]*)"', chart)
    assert [bool(path) for path in paths] == [bool(lines)]
    assert chart.count("<circle") == count


def test_a_gap_has_no_value_to_hover_over() -> None:
    points = [(1.0, 0.5), (2.0, float("nan")), (3.0, 0.25), (4.0, 0.125)]
    chart = line_chart([Series("loss", points, "c0")], y_label="loss")
    told = re.findall(r'class="hover"[^>]*><title>([^<]*)</title>', chart)
    assert told == ["RL step 1\nloss: 0.5", "RL step 3\nloss: 0.25", "RL step 4\nloss: 0.125"]


def test_every_series_is_told_at_its_step() -> None:
    two = [Series(name, [(1.0, y), (2.0, y)], "c0") for name, y in (("a", 1.0), ("b<", 2.0))]
    chart = line_chart(two, y_label="y")
    assert "<title>RL step 2\na: 1\nb&lt;: 2</title>" in chart


def test_the_values_behind_a_smooth_line_are_told_apart_and_have_no_dots() -> None:
    records = [StepRecord(step=n, response_tokens=100 * n, rollout_s=1.0) for n in (1, 2)]
    drawn = drawing(records, "Rollout speed")
    assert "RL step 3\ntokens/s of a step: 200\ntokens/s: 150" in drawn
    assert drawn.count("<circle") == 2
    assert re.findall("</i>([^<]*)</span>", drawn) == ["tokens/s"]
