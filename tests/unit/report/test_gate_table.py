"""The gate's decisions as a table."""

from __future__ import annotations

from paceline.report.journal import DrafterDecision
from paceline.report.tables import gate_table

FIGURES = {
    "kind": "eagle",
    "candidate_accept_length": 2.5,
    "serving_accept_length": 2.25,
    "noise": 0.0625,
    "positions": 1234,
    "optimizer_steps": 40,
}


def test_the_newest_decision_stands_first_with_candidate_against_serving() -> None:
    decisions = [DrafterDecision(n, "kept", n, FIGURES) for n in range(30)]
    decisions.append(DrafterDecision(30, "promoted", 31, FIGURES))
    table = gate_table(decisions)
    assert table.rows[0][:5] == (31, "promoted", "d31", "eagle", "2.50 : 2.25")


def test_a_decision_without_figures_has_dashes() -> None:
    assert "– : –" in gate_table([DrafterDecision(0, "refused", 1, {})]).rows[0]
    assert "not judged" in gate_table([]).empty
