"""Acceptance by arm over the steps, and by drafter version beside what its gate had projected."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from paceline.report.figures import run_charts
from paceline.report.journal import Ruling, RunHistory
from paceline.report.tables import acceptance_table, projected
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.v1.trajectory_pb2 import VersionSet

CHAIN, NGRAM = "eagle:3_1_4", "ngram:4_1_5"
FIGURES = {"kind": "eagle", "survival": [0.75, 0.5, 0.125, 0.0625]}
PROMOTED = Ruling(1, "promoted", 1, FIGURES)


def record(step: int, drafter: int, **by_arm: tuple[int, int]) -> StepRecord:
    """(rounds, tokens) of the arms, whose names are words here."""
    names = {"eagle": CHAIN, "ngram": NGRAM}
    return StepRecord(
        step=step,
        versions=VersionSet(drafter=drafter),
        arm_drafted_rounds={names[one]: rounds for one, (rounds, _) in by_arm.items()},
        arm_round_tokens={names[one]: tokens for one, (_, tokens) in by_arm.items()},
    )


def run_of(history: RunHistory, *records: StepRecord, **more: Any) -> RunHistory:
    """A history of these steps alone."""
    return replace(history, records=records, evaluations={}, **more)


def rows_of(table: str) -> list[list[str]]:
    return [re.findall("<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]


def by_arm(history: RunHistory) -> str:
    return next(
        drawing for title, _, drawing in run_charts(history) if title == "Acceptance by arm"
    )


def test_a_versions_row_sums_the_rounds_of_its_steps_before_it_divides(history: RunHistory) -> None:
    told = run_of(
        history,
        record(0, 0, eagle=(10, 10), ngram=(4, 5)),
        record(1, 0, eagle=(30, 90)),
        record(2, 1, eagle=(100, 250)),
        record(3, 0, eagle=(60, 100)),  # the one before serves again
        record(4, 1),  # nothing was drafted
        promoted={1: PROMOTED},
    )
    assert rows_of(acceptance_table(told)) == [
        ["d1", CHAIN, "2.50", "2.38", "100", "250", "3"],  # 1 + 0.75 + 0.5 + 0.125 = 2.375
        ["d0", CHAIN, "2.00", "–", "100", "200", "1–2, 4"],
        ["d0", NGRAM, "1.25", "–", "4", "5", "1–2, 4"],
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


@pytest.mark.parametrize(
    ("arm", "length"),
    [
        ("eagle:1_1_2", 1.75),
        ("eagle:4_1_5", 2.4375),
        ("eagle:5_1_6", None),  # deeper than what was judged
        ("eagle:3_2_8", None),  # a tree
        ("lstm:3_1_4", None),  # another kind
        ("off", None),
    ],
)
def test_the_gate_projects_chains_of_its_kind_as_deep_as_it_has_judged(
    arm: str, length: float | None
) -> None:
    assert projected(PROMOTED, arm) == length
    assert projected(None, arm) is None
    assert projected(Ruling(1, "promoted", 1, {}), arm) is None


def test_the_table_has_the_newest_twelve_versions(history: RunHistory) -> None:
    rows = rows_of(
        acceptance_table(run_of(history, *(record(n, n, eagle=(1, 2)) for n in range(15))))
    )
    assert [row[0] for row in rows] == [f"d{n}" for n in range(14, 2, -1)]


def test_a_run_without_drafts_says_so(history: RunHistory) -> None:
    assert "nothing was drafted" in acceptance_table(run_of(history, record(0, 0)))
    assert "nothing was measured" in by_arm(run_of(history, record(0, 0)))


def test_a_run_of_many_steps_reads_its_arms_out_of_the_journal(history: RunHistory) -> None:
    rows = rows_of(acceptance_table(history))
    # The chain drafts 60 to 69 rounds in the last ten steps, n-grams 8 in three of them.
    assert rows[:2] == [
        ["d2", CHAIN, "3.00", "–", "645", "1,935", "21–30"],
        ["d2", NGRAM, "1.25", "–", "24", "30", "21–30"],
    ]
