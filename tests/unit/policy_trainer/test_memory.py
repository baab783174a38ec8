"""The policy trainer's device memory: `offload` and `reshard_after_forward` free bytes.

Each test fails if the setting has no effect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from random_models import save_random
from rank_processes import run_ranks
from unit.policy_trainer import memory_ranks

SHAPE = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
COUNTERS = 1_024
"""Bytes at most of figures that a step leaves."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random(directory, "llama", **SHAPE)
    return directory


def measure(model: Path, out: Path, ranks: int, **settings: Any) -> list[dict[str, int]]:
    """Bytes of each rank at the moments that memory_ranks.py names."""
    out.mkdir()
    run_ranks(memory_ranks.main, ranks, out, model, out, settings)
    return [json.loads((out / f"memory-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_with_offload_holds_no_weight_and_no_moment_between_steps(
    model_dir: Path, tmp_path: Path, ranks: int
) -> None:
    """Policy, reference and critic leave the device; nothing else grows meanwhile."""
    algorithm = {"name": "ppo", "kl": {"coefficient": 0.1}}
    for rank in measure(model_dir, tmp_path / "out", ranks, offload=True, algorithm=algorithm):
        assert rank["kept"] > 7 * SHAPE["num_hidden_layers"] * rank["layer"] / ranks
        assert rank["kept in step 1"] == rank["kept in step 2"] == rank["kept"]
        for moment in ("at the start", "after step 1", "after step 2"):
            assert rank[f"kept {moment}"] == 0, moment
        # The CPU copies replace the tensors that left: no gradient, nothing gathered.
        assert rank["live after step 1"] < rank["live"] + COUNTERS
        assert rank["live after step 2"] < rank["live"] + COUNTERS


@pytest.mark.slow
def test_a_rank_that_reshards_holds_one_gathered_layer_and_its_part_of_the_gradients(
    model_dir: Path, tmp_path: Path
) -> None:
    plain = measure(model_dir, tmp_path / "plain", 2)
    saving = measure(model_dir, tmp_path / "saving", 2, reshard_after_forward=True)
    for whole, saved in zip(plain, saving, strict=True):
        earlier = (SHAPE["num_hidden_layers"] - 1) * whole["layer"]
        assert whole["gathered"] == earlier
        assert saved["gathered"] == 0
        fewer = whole["live after the forward"] - saved["live after the forward"]
        assert fewer > 0.9 * earlier
        name = "live before the second micro-batch"
        assert whole[name] - saved[name] > 0.9 * earlier / 2, "gradients are added up whole"
        assert whole["kept after step 2"] == whole["kept"], "nothing leaves without offload"
        assert saved["live after step 2"] < saved["live"] + COUNTERS
