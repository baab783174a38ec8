"""One optimiser step on one rank and on two ranks is the same step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from unit.drafter_trainer.samples import TARGET

from paceline.local.ports import free_port
from paceline.speculators.eagle import EagleNet

HERE = Path(__file__).parent


def step(out: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Runs the step in `world_size` real gloo processes."""
    shared = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sharded_step.py"), str(HERE / "samples.py"), str(out)],
            env={**os.environ, **{k: str(v) for k, v in shared.items()}, "RANK": str(r), "LOCAL_RANK": str(r)},
        )
        for r in range(world_size)
    ]
    try:
        assert [rank.wait(timeout=90) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
    return load_file(out)


def test_two_ranks_step_as_one(tmp_path: Path) -> None:
    one, two = step(tmp_path / "one", 1), step(tmp_path / "two", 2)
    assert one["figures"][:2].tolist() == two["figures"][:2].tolist() == [1.0, 1.0]
    start = EagleNet(TARGET, seed=1).state_dict()
    for name in start:
        distance = (one[name] - two[name]).double().norm() / one[name].double().norm()
        assert distance < 1e-5, name
        assert not torch.equal(one[name], start[name]), name
