"""One optimiser step on one rank and on two ranks is the same step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional
from unit.drafter_trainer.samples import PROMPT, TARGET, toy_policy

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


def reference() -> tuple[float, dict[str, torch.Tensor]]:
    """Summed loss and mean gradient of the same sequences, one forward each, without packing, sharding or sums."""
    policy, net = toy_policy(), EagleNet(TARGET, seed=1)
    net.bind(policy.embed, policy.head)
    losses = []
    for seed in range(16):
        tokens, hidden = policy.rows(9 + 3 * (seed // 4) + seed % 4, seed)
        length = len(tokens) - 2
        features = net.features(hidden[None, :-1], tokens[None, 1:-1], torch.arange(length)[None])[0]
        for t in range(PROMPT - 2, length):
            target = policy.head @ hidden[t + 1]
            soft = -(target.softmax(-1) * (policy.head @ features[t]).log_softmax(-1)).sum()
            losses.append(functional.smooth_l1_loss(features[t], hidden[t + 1]) + 0.1 * soft)
    torch.stack(losses).mean().backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    return float(torch.stack(losses).detach().sum()), gradients


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in the 2-norm."""
    return float((a - b).double().norm() / b.double().norm())


def test_two_ranks_step_as_one_and_as_plain_torch(tmp_path: Path) -> None:
    one, two = step(tmp_path / "one", 1), step(tmp_path / "two", 2)
    loss, gradients = reference()
    for figures in (one["figures"], two["figures"]):
        assert figures[0] == 1
        assert abs(float(figures[1]) - loss) < 1e-5 * loss
    start = EagleNet(TARGET, seed=1).state_dict()
    for name in start:
        assert relative(two[name], one[name]) < 1e-5, name
        assert relative(two[f"exp_avg.{name}"], one[f"exp_avg.{name}"]) < 1e-5, name
        # AdamW's first moment after one step is (1 - beta1) times the gradient: beta1 is 0.9.
        assert relative(one[f"exp_avg.{name}"], 0.1 * gradients[name]) < 1e-5, name
        assert relative(one[name], start[name]) > 1e-4, name
