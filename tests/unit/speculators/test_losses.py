"""The loss is the formula of its docstring, over valid positions only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.speculators.losses import eagle_loss


def formula(f: np.ndarray, h: np.ndarray, w: np.ndarray, valid: np.ndarray, a: float, b: float) -> float:
    """One position and one number at a time, float64."""
    total = 0.0
    for t in np.flatnonzero(valid):
        smooth = [0.5 * d * d if abs(d) < 1 else abs(d) - 0.5 for d in f[t] - h[t]]
        p = np.exp(w @ h[t]) / np.exp(w @ h[t]).sum()
        log_q = w @ f[t] - np.log(np.exp(w @ f[t]).sum())
        total += a * sum(smooth) / len(smooth) - b * float((p * log_q).sum())
    return total


@pytest.mark.parametrize(("feature_weight", "token_weight"), [(1.0, 0.1), (0.0, 1.0), (0.5, 0.0)])
def test_loss_and_gradient_are_those_of_the_formula(feature_weight: float, token_weight: float) -> None:
    draw = np.random.default_rng(0)
    f, h, w = draw.normal(0, 2, (9, 5)), draw.normal(0, 2, (9, 5)), draw.normal(0, 1, (7, 5))
    valid = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    predicted, head = torch.tensor(f, requires_grad=True), torch.tensor(w, requires_grad=True)
    weights = {"feature_weight": feature_weight, "token_weight": token_weight}
    sums = eagle_loss(predicted, torch.tensor(h), head.detach(), torch.tensor(valid), **weights)
    expected = formula(f, h, w, valid, feature_weight, token_weight)
    # The token loss is taken in fp32, whatever comes in.
    assert float(sums.loss.detach()) == pytest.approx(expected, rel=2e-6)
    assert int(sums.positions) == 6
    assert int(sums.terms["correct"]) == sum(
        int((w @ f[t]).argmax() == (w @ h[t]).argmax()) for t in np.flatnonzero(valid)
    )
    sums.loss.backward()
    assert predicted.grad is not None
    for t, i in ((0, 1), (3, 4), (8, 0)):
        moved = f.copy()
        moved[t, i] += 1e-5
        slope = (formula(moved, h, w, valid, feature_weight, token_weight) - expected) / 1e-5
        assert float(predicted.grad[t, i]) == pytest.approx(slope, rel=1e-3, abs=1e-4)
    assert not predicted.grad[~torch.tensor(valid)].any()


def test_a_micro_batch_without_valid_positions_costs_nothing() -> None:
    predicted = torch.zeros(3, 4, requires_grad=True)
    sums = eagle_loss(predicted, torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.bool))
    sums.loss.backward()
    assert (float(sums.loss.detach()), int(sums.positions)) == (0.0, 0)
    assert predicted.grad is not None
    assert not predicted.grad.any()
