"""The bench of float32 products."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from random_models import save_random

from benchmarks import prefills, products
from benchmarks.products import NEVER_SLOWER, SHAPES, decoding_rounds, measured


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


def test_rounds_of_a_model_are_timed_in_the_measured_forms_and_in_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.models.products._QUIET", math.inf)  # other tests run beside
    save_random(tmp_path, "llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
    result = decoding_rounds(tmp_path, torch.float32, pairs=2)
    assert [(row["batch"], row["tokens each"]) for row in result.rows] == list(SHAPES)
    assert (tmp_path / "cache" / "paceline" / "products.json").is_file()


def test_an_engines_prompts_and_its_round_beside_the_products_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefills, "SHORT", 20)
    monkeypatch.setattr(prefills, "LONG", 140)
    save_random(tmp_path, "llama")
    rows, goals = prefills.engine_times(tmp_path, "float32", pairs=2)
    assert [row.get("tokens") for row in rows] == [20, 140, None]
    assert 0 < float(str(rows[2]["products alone, ms"])) < float(str(rows[2]["ms"]))
    assert [goal.goal for goal in goals] == [3.2, -7.9, -0.05]
