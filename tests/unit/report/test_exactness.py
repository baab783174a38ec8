"""The pages' display of the audit."""

from __future__ import annotations

from dataclasses import replace

from paceline.report.figures import CHARTS
from paceline.report.journal import RunHistory
from paceline.report.tables import exactness_table
from paceline.v1.coordinator_pb2 import StepRecord

ARM = "arm=eagle:3_1_4"
BEYOND = {
    "reused": {
        "step": 1,
        "tokens": 340,
        "mean": 0.75,
        "upper": 2.5,
        "mean_bound": 5e-4,
        "upper_bound": 5e-3,
    }
}


def record(step: int, path: str, gap: float, tokens: int) -> StepRecord:
    figures = {"audit_gap": gap, "audit_upper": 4 * gap, "audit_tokens": float(tokens)}
    named = {f"{what}/{path}": value for what, value in figures.items()}
    return StepRecord(step=step, policy=named)


def test_a_path_within_its_bound_shows_all_its_tokens_and_their_mean(history: RunHistory) -> None:
    records = (record(0, ARM, 1e-6, 100), record(1, ARM, 4e-6, 300))
    table = exactness_table(replace(history, records=records))
    words = (ARM, "within its bound", "drafted by eagle:3_1_4")
    assert list(table.rows) == [(*words, "400", "3.2e-06", "1.6e-05", "–")]
    assert not table.bad


def test_a_path_beyond_its_bound_shows_what_it_was_named_for(history: RunHistory) -> None:
    told = replace(history, records=(record(0, "reused", 0.5, 10),), beyond=BEYOND)
    table = exactness_table(told)
    assert "reused" in table.bad
    (row,) = table.rows
    assert row[1] == "beyond its bound, in step 2"
    assert row[3:] == ("340", "0.75", "2.5", "0.0005, 0.005")


def test_a_run_without_an_audit_says_how_to_have_one(history: RunHistory) -> None:
    assert "policy_trainer.audit.share" in exactness_table(replace(history, records=())).empty


def test_the_chart_has_a_line_for_each_path() -> None:
    records = [record(0, "plain", 1e-6, 100), record(1, "plain", 2e-6, 100)]
    records[0].policy.update(record(0, "reused", 1e-5, 50).policy)
    drawing = CHARTS[-1].draw(RunHistory(records))
    assert "plain" in drawing
    assert "reused" in drawing
