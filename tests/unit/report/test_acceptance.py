"""Acceptance by arm over the steps, and by drafter version beside its gate's projection."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from paceline.report.figures import CHARTS
from paceline.report.journal import RunHistory
from paceline.report.tables import acceptance_table
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.v1.trajectory_pb2 import VersionSet

CHAIN, NGRAM = "eagle:3_1_4", "ngram:4_1_5"


def record(step: int, drafter: int, **by_arm: tuple[int, int]) -> StepRecord:
    """Return a step with (rounds, tokens) of its arms, under short names."""
    names = {"eagle": CHAIN, "ngram": NGRAM}
    return StepRecord(
        step=step,
        versions=VersionSet(drafter=drafter),
        arm_drafted_rounds={names[one]: rounds for one, (rounds, _) in by_arm.items()},
        arm_round_tokens={names[one]: tokens for one, (_, tokens) in by_arm.items()},
    )


def run_of(history: RunHistory, *records: StepRecord, **more: Any) -> RunHistory:
    """A history with these steps alone."""
    return replace(history, records=records, evaluations={}, **more)


def rows_of(history: RunHistory) -> list[tuple[object, ...]]:
    return [tuple(row) for row in acceptance_table(history).rows]


def by_arm(history: RunHistory) -> str:
    return next(one for one in CHARTS if one.title == "Acceptance by arm").draw(history)


def test_a_versions_row_sums_the_rounds_of_its_steps_before_it_divides(history: RunHistory) -> None:
    told = run_of(
        history,
        record(0, 0, eagle=(10, 10), ngram=(4, 5)),
        record(1, 0, eagle=(30, 90)),
        record(2, 1, eagle=(100, 250)),
        record(3, 0, eagle=(60, 100)),  # the one before serves again
        record(4, 1),  # nothing was drafted
    )
    assert rows_of(told) == [
        ("d1", CHAIN, "2.50", "100", "250", 1),
        ("d0", CHAIN, "2.00", "100", "200", 3),
        ("d0", NGRAM, "1.25", "4", "5", 3),
    ]


def test_arms_have_a_line_each_that_breaks_where_they_drafted_nothing(history: RunHistory) -> None:
    steps = [record(n, 0, eagle=(2, 4), **({} if n == 2 else {"ngram": (4, 5)})) for n in range(5)]
    drawing = by_arm(run_of(history, *steps))
    lines = re.findall(r'<path class="line (c\d)" d="([^"]+)"', drawing)
    assert [(color, path.count("M"), path.count("L")) for color, path in lines] == [
        ("c0", 1, 4),
        ("c1", 2, 2),
    ]
    assert f"<title>RL step 3\n{CHAIN}: 2</title>" in drawing
    assert f"<title>RL step 4\n{CHAIN}: 2\n{NGRAM}: 1.25</title>" in drawing


def test_a_mark_stands_at_the_first_step_of_each_new_drafter(history: RunHistory) -> None:
    steps = [record(n, n // 2, eagle=(2, 4)) for n in range(5)]
    marks = re.findall(r'class="mark" d="M([\d.]+) ', by_arm(run_of(history, *steps)))
    # Steps 1 to 5 lie between 46 and 548 pixels: the third and the last are the first of a version.
    assert marks == ["297.0", "548.0"]


def test_the_table_has_the_newest_twelve_versions(history: RunHistory) -> None:
    rows = rows_of(run_of(history, *(record(n, n, eagle=(1, 2)) for n in range(15))))
    assert [row[0] for row in rows] == [f"d{n}" for n in range(14, 2, -1)]


def test_a_run_without_drafts_has_no_rows_and_no_chart(history: RunHistory) -> None:
    assert rows_of(run_of(history, record(0, 0))) == []
    assert by_arm(run_of(history, record(0, 0))) == ""


def test_a_run_of_many_steps_reads_its_arms_out_of_the_journal(history: RunHistory) -> None:
    # The chain drafts 60 to 69 rounds in the last ten steps, n-grams draft 8 in three steps.
    assert rows_of(history)[:2] == [
        ("d2", CHAIN, "3.00", "645", "1,935", 10),
        ("d2", NGRAM, "1.25", "24", "30", 10),
    ]
