"""Losses of the Tinker API against their formulas in float64, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.services.policy_trainer.algorithms.token_losses import token_loss

GIVEN = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}


def by_hand(name: str, p: Tensor, w: Tensor, q: Tensor, a: Tensor) -> Tensor:
    ratio = (p - q).exp()
    clipped = ratio.clamp(0.9, 1.3)
    return {
        "cross_entropy": -w * p,
        "importance_sampling": -ratio * a,
        "ppo": -torch.minimum(ratio * a, clipped * a),
    }[name]


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo"])
def test_loss_and_gradient_equal_the_formula(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    p, q = (-torch.rand(64, generator=draw, dtype=torch.float64) for _ in range(2))
    w, a = (torch.randn(64, generator=draw, dtype=torch.float64) for _ in range(2))
    loss = token_loss(name)
    options = loss.chosen(GIVEN if loss.options else {})
    inputs = {"weights": w, "logprobs": q, "advantages": a}
    found = []
    for function in (
        lambda one: loss.function(one, inputs, options),
        lambda one: by_hand(name, one, w, q, a),
    ):
        policy = p.clone().requires_grad_()
        losses = function(policy)
        losses.sum().backward()
        found.append((losses.detach(), policy.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_unknown_losses_and_options_are_refused() -> None:
    with pytest.raises(InvalidInput, match="gspo"):
        token_loss("gspo")
    with pytest.raises(InvalidInput, match="beta"):
        token_loss("ppo").chosen({"beta": 1.0})
    assert token_loss("ppo").chosen({"clip_high_threshold": 1.5}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.5,
    }
