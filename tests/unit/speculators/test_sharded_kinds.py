"""Drafters with inner states and layers, sharded by FSDP2, step as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file
from unit.speculators import kind_sharded_step
from unit.speculators.kind_sharded_step import CONFIG, drafter, step_rows


def stepped(kind: str, out: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Weights after one optimiser step of `ranks` real gloo processes, with first moments as
    `exp_avg.*`.
    """
    run_ranks(kind_sharded_step.main, ranks, out.parent, kind, out)
    return load_file(out)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in the 2-norm."""
    return float((a - b).double().norm() / b.double().norm())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_two_ranks_step_as_plain_torch_does(kind: str, tmp_path: Path) -> None:
    two, net = stepped(kind, tmp_path / "two", 2), drafter(kind)
    objectives = [net(row) for row in step_rows()]
    (sum(one.loss for one in objectives) / sum(one.positions for one in objectives)).backward()
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    torch.optim.AdamW(
        net.parameters(), lr=CONFIG.lr, betas=CONFIG.betas, weight_decay=CONFIG.weight_decay
    ).step()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        assert relative(two[name], parameter.detach()) < 1e-5, name
        assert relative(two[name], start[name]) > 1e-4, name
        # AdamW's first moment after one step is (1 - beta1) times the gradient.
        assert relative(two[f"exp_avg.{name}"], (1 - CONFIG.betas[0]) * parameter.grad) < 1e-5, name
    for name, buffer in net.named_buffers():
        assert torch.equal(two[name], buffer), name
