"""The tracing bench: it runs with its real gateways, and its conclusions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.result import Ratio, cost_goal, paired_ratio
from benchmarks.tracing import ENVIRONMENTS, GOAL, SPANS_ALONE, span_cpu_s
from paceline.local.patience import patient
from paceline.report.spans import read_spans


@pytest.mark.parametrize(
    ("low", "value", "high", "met"),
    [
        (0.99, 1.004, 1.01, True),
        (0.99, 1.004, 1.0101, None),
        (1.009, 1.02, 1.03, None),
        (1.011, 1.02, 1.03, False),
    ],
)
def test_the_goal_is_judged_by_the_whole_interval(
    low: float, value: float, high: float, met: bool | None
) -> None:
    goal = cost_goal("CPU time", GOAL, Ratio(value, low, high, 12))
    assert (goal.met, goal.value, goal.goal) == (met, -value, -1.01)


def test_an_overhead_of_two_percent_is_seen_through_noise() -> None:
    noise = [1 + 0.004 * (-1) ** number for number in range(12)]
    traced = [1.02 * one for one in noise]
    assert cost_goal("CPU time", GOAL, paired_ratio(traced, noise[::-1])).met is False


def test_a_span_alone_is_measured_with_its_line_in_the_file(tmp_path: Path) -> None:
    assert 1e-6 < span_cpu_s(tmp_path) < 5e-3
    assert sum(1 for _ in read_spans(tmp_path)) == SPANS_ALONE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gateways_that_differ_in_tracing_alone_say_the_same_and_one_has_spans(
    tmp_path: Path,
) -> None:
    words = ["--pairs", "1", "--requests", "8", "--streams", "4", "--tokens", "8"]
    path = tmp_path / "tracing.json"
    command = [sys.executable, "-m", "benchmarks", "tracing", *words, "--json", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patient(200), check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["gateway"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(ENVIRONMENTS) < set(rows)
    assert rows["traced"]["spans a request"] >= 5  # call, request, queue, prefill, decode
    assert rows["off"]["spans a request"] == 0
    assert all(row["CPU s a turn"] > 0 for row in rows.values())
