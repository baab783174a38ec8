"""The bench of float32 products."""

from __future__ import annotations

import pytest

from benchmarks import products
from benchmarks.products import NEVER_SLOWER, measured


@pytest.mark.parametrize("trains", [False, True], ids=["forward", "with gradients"])
def test_both_sides_multiply_and_are_timed_in_pairs(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "FLOPS_A_TIMING", 1e6)
    row, goal = measured(64, 3, trains=trains)
    assert (row["rows"], row["step"]) == (64, "with gradients" if trains else "forward")
    assert min(float(str(row[side])) for side in ("GFLOP/s", "torch's GFLOP/s")) > 0
    assert goal.goal == NEVER_SLOWER
    assert str(row["ratio"]) in goal.name
