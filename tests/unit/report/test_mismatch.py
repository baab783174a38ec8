"""The charts of the policy step against the records they draw."""

from __future__ import annotations

import re

from paceline.report.figures import CHARTS
from paceline.report.journal import RunHistory
from paceline.report.summary import summarize
from paceline.streams import LedgerCount
from paceline.v1.coordinator_pb2 import StepRecord

TITLES = (
    *("Sampler against trainer", "Gap by age", "Gap by arm", "Gap by numbers"),
    *("Divergence of the sampler", "Weight of the tokens", "Where the policy step's time went"),
)


def drawn(*policies: dict[str, float]) -> dict[str, str]:
    records = [StepRecord(step=i, policy=policy) for i, policy in enumerate(policies)]
    history = RunHistory(records)
    return {one.title: one.draw(history) for one in CHARTS if one.title in TITLES}


def test_a_step_that_did_not_measure_the_gap_leaves_one_in_its_line() -> None:
    chart = drawn(
        {"behavior_gap": 0.1}, {"loss": 1.0}, {"behavior_gap": 0.3}, {"behavior_gap": 0.2}
    )
    line = chart["Sampler against trainer"].split('class="line c0" d="')[1].split('"')[0]
    assert line.count("M") == 2
    assert line.count("L") == 1


def test_each_kind_of_token_has_its_line() -> None:
    charts = {
        "Gap by age": ["lag=0", "lag=10"],
        "Gap by arm": ["arm=off", "arm=eagle:5_1_6"],
        "Gap by numbers": ["numbers=float32", "numbers=int8"],
    }
    every = {f"behavior_gap/{name}": 0.1 for names in charts.values() for name in names}
    for title, names in charts.items():
        legend = re.findall("</i>([^<]*)</span>", drawn(every)[title])
        assert sorted(legend) == sorted(name.partition("=")[2] for name in names)


def test_the_wait_for_the_batch_is_shown_beside_the_other_parts() -> None:
    chart = drawn({"seconds/batch_wait": 2.0, "seconds/optimizer": 1.0})[
        "Where the policy step's time went"
    ]
    assert "</i>batch wait</span>" in chart
    assert "fill c0" in chart
    assert "fill c3" in chart


def test_a_run_without_figures_has_no_drawing() -> None:
    assert not any(drawn({}).values())
    assert len(drawn({})) == len(TITLES)


def test_the_summary_means_over_the_steps_that_measured_and_has_none_without() -> None:
    records = tuple(
        StepRecord(step=i, policy=policy)
        for i, policy in enumerate(({"behavior_gap": 0.1}, {}, {"behavior_gap": 0.3}))
    )
    history = RunHistory(records, began_s=5.0, ended_s=6.0, phase="finished")
    summary = summarize("demo", history, LedgerCount(0, 0, {}, 0, 0), {}, {})
    assert summary["mismatch_last"]["behavior_gap"] == 0.2
    assert summary["mismatch_last"]["behavior_k3"] is None
