"""The gate's decisions as a table."""

from __future__ import annotations

from paceline.report.journal import Ruling
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
    rulings = [Ruling(n, "kept", n, FIGURES) for n in range(30)]
    rulings.append(Ruling(30, "promoted", 31, FIGURES))
    table = gate_table(rulings)
    first = table[table.index("<tbody>") :]
    assert first.startswith(
        "<tbody><tr><td>31</td><td>promoted</td><td>d31</td><td>eagle</td>"
        '<td class="n">2.50 : 2.25</td>'
    )
    assert table.count("<tr>") == 1 + 20


def test_a_decision_without_figures_has_dashes() -> None:
    assert "– : –" in gate_table([Ruling(0, "refused", 1, {})])
    assert "not judged" in gate_table([])
