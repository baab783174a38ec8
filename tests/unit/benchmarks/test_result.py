"""Paired ratios and the files that a bench writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.result import BenchResult, Goal, Row, paired_ratio
from paceline.errors import InvalidInput


def test_steady_pairs_resolve_although_the_machine_drifts() -> None:
    drift = np.linspace(1, 10, 25)
    ratio = paired_ratio(list(0.5 * drift), list(drift))
    assert (ratio.value, ratio.low, ratio.high, ratio.pairs) == (0.5, 0.5, 0.5, 25)
    assert ratio.resolved


def test_scattered_pairs_do_not_resolve() -> None:
    rng = np.random.default_rng(3)
    ratio = paired_ratio(list(rng.uniform(0.2, 1, 9)), [1.0] * 9)
    assert ratio.low < ratio.value < ratio.high
    assert not ratio.resolved
    assert str(ratio).endswith("unresolved")


def test_interval_covers_the_true_median_about_95_times_in_100() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        ratio = paired_ratio(list(np.exp(rng.normal(0, 0.1, 31))), [1.0] * 31, seed=trial)
        covered += ratio.low <= 1.0 <= ratio.high
    assert 180 <= covered <= 199


def test_interval_is_the_same_every_time() -> None:
    ours = [1.0, 1.1, 0.9, 1.3, 1.2]
    assert paired_ratio(ours, [2.0] * 5) == paired_ratio(ours, [2.0] * 5)


def test_pairs_must_be_pairs_of_positive_numbers() -> None:
    for ours, theirs in (([1.0], []), ([], []), ([1.0], [0.0])):
        with pytest.raises(InvalidInput):
            paired_ratio(ours, theirs)


def test_json_holds_rows_goals_machine_versions_and_date(tmp_path: Path) -> None:
    result = BenchResult(
        "t", [{"a": 1.5, "b": None}], [Goal("fast", 0.4, 0.5, True), Goal("odd", 1.0, 0.9, None)]
    )
    result.write_json(tmp_path / "deep" / "t.json")
    facts = json.loads((tmp_path / "deep" / "t.json").read_text())
    assert facts.keys() == {"rows", "goals", "machine", "versions", "date"}
    assert facts["goals"][0] == {"name": "fast", "goal": 0.4, "value": 0.5, "met": True}
    assert "cores" in facts["machine"]
    assert {"python", "grpcio"} <= facts["versions"].keys()


def test_rows_of_one_section_stand_in_a_table_under_its_name() -> None:
    rows: list[Row] = [
        {"section": "first", "a": 1.5},
        {"section": "second", "b": "words"},
        {"section": "first", "a": 2.5},
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    BenchResult("whole", rows, []).print(console)
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert [line for line in lines if line in ("whole", "first", "second")] == [
        "whole",
        "first",
        "second",
    ]
    assert sum("1.500" in line or "2.500" in line for line in lines[: lines.index("second")]) == 2
