"""Builds AdamW, warms it up and names its state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import AdamW

from paceline.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
_EPS = 1e-8  # added to the root of the second moment: torch's, which nobody has had to change


def make_optimizer(parameters: Mapping[str, Tensor], config: OptimizerConfig) -> AdamW:
    """AdamW with zero moments: its state has its shape before the first step."""
    optimizer = AdamW(
        parameters.values(),
        lr=config.lr,
        betas=config.betas,
        eps=_EPS,
        weight_decay=config.weight_decay,
        foreach=True,
    )
    for parameter in parameters.values():
        moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return optimizer


def warm_up(optimizer: AdamW, config: OptimizerConfig, step: int) -> None:
    """lr_t = lr * min(1, t / warmup_steps) for step t, counted from 1."""
    warm = min(1.0, step / max(config.warmup_steps, 1))
    for group in optimizer.param_groups:
        group["lr"] = config.lr * warm
