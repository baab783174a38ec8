"""Runs examples/batch_evaluation as its README does; compares it with hand-computed figures."""

from __future__ import annotations

import itertools
import json
import math
import runpy
from pathlib import Path

import pytest
from example_runs import ROOT, Serve, run_example

SCRIPT = "batch_evaluation/evaluate.py"


@pytest.mark.slow
def test_the_figures_are_the_expected_ones_and_a_mismatch_exits_with_1(
    serve: Serve, tmp_path: Path
) -> None:
    url = serve("batch_evaluation")
    done = run_example(SCRIPT, "--url", url)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {
        line.split("│")[1].strip(): line
        for line in done.stdout.splitlines()
        if line.startswith("│")
    }
    assert "4/4" in lines["sum"]
    assert "+ - + -" in lines["difference"]
    assert "0.6667" in lines["pass@2"]
    other = tmp_path / "expected.json"
    other.write_text(json.dumps({"accuracy": 0.6, "pass@8": 1.0}))
    done = run_example(SCRIPT, "--url", url, "--expected", str(other))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "accuracy: expected 0.6, found 0.5000",
        "pass@8: expected 1.0, found nan",
    ]


@pytest.mark.parametrize(("n", "right"), [(1, 0), (4, 1), (4, 3), (5, 2), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(n: int, right: int) -> None:
    pass_at = runpy.run_path(str(ROOT / "examples" / SCRIPT))["pass_at"]
    samples = [number < right for number in range(n)]
    for k in range(1, n + 1):
        draws = [any(draw) for draw in itertools.combinations(samples, k)]
        assert math.isclose(pass_at(k, n, right), sum(draws) / len(draws))
