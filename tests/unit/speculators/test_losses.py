"""The loss is the formula of its docstring, over valid positions only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.speculators.net import draft_losses, eagle_loss, teacher_of


def formula(
    f: np.ndarray, h: np.ndarray, w: np.ndarray, valid: np.ndarray, a: float, b: float
) -> float:
    """Return the EAGLE loss in float64, one position and one number at a time."""
    total = 0.0
    for t in np.flatnonzero(valid):
        smooth = [0.5 * d * d if abs(d) < 1 else abs(d) - 0.5 for d in f[t] - h[t]]
        p = np.exp(w @ h[t]) / np.exp(w @ h[t]).sum()
        log_q = w @ f[t] - np.log(np.exp(w @ f[t]).sum())
        total += a * sum(smooth) / len(smooth) - b * float((p * log_q).sum())
    return total


@pytest.mark.parametrize(("feature_weight", "token_weight"), [(1.0, 0.1), (0.0, 1.0), (0.5, 0.0)])
def test_loss_and_gradient_are_those_of_the_formula(
    feature_weight: float, token_weight: float
) -> None:
    draw = np.random.default_rng(0)
    f, h, w = draw.normal(0, 2, (9, 5)), draw.normal(0, 2, (9, 5)), draw.normal(0, 1, (7, 5))
    valid = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    predicted, head = torch.tensor(f, requires_grad=True), torch.tensor(w, requires_grad=True)
    weights = {"feature_weight": feature_weight, "token_weight": token_weight}
    sums = eagle_loss(predicted, torch.tensor(h), head.detach(), torch.tensor(valid), **weights)
    expected = formula(f, h, w, valid, feature_weight, token_weight)
    # The token loss is computed in fp32 for any input type.
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
    sums = eagle_loss(
        predicted, torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.bool)
    )
    sums.loss.backward()
    assert (float(sums.loss.detach()), int(sums.positions)) == (0.0, 0)
    assert predicted.grad is not None
    assert not predicted.grad.any()


def draft_formula(x: np.ndarray, p: np.ndarray) -> float:
    """Return the loss of one position in float64.

    p: the target's probabilities of the draftable tokens; x: the drafter's logits of the same
    tokens.
    """
    q = np.exp(x) / np.exp(x).sum()
    taught = p / p.sum()
    return float(-(taught * np.log(q)).sum())


def test_draft_losses_and_their_gradients_are_those_of_the_formulas() -> None:
    draw = np.random.default_rng(1)
    states, head, x = (
        draw.normal(0, 1, (6, 5)),
        draw.normal(0, 1, (9, 5)),
        draw.normal(0, 2, (6, 4)),
    )
    t2d = np.isin(np.arange(9), [1, 3, 4, 8])
    log_p, drafted = teacher_of(torch.tensor(states), torch.tensor(head), torch.tensor(t2d))
    logits = torch.tensor(x, requires_grad=True)
    losses, alphas = draft_losses(logits, log_p)
    losses.sum().backward()
    assert logits.grad is not None
    for t in range(6):
        full = np.exp(head @ states[t]) / np.exp(head @ states[t]).sum()
        p, q = full[t2d], np.exp(x[t]) / np.exp(x[t]).sum()
        alpha = float(np.minimum(p, q).sum())
        assert bool(drafted[t]) == bool(t2d[full.argmax()])
        assert float(alphas[t].detach()) == pytest.approx(alpha, rel=2e-6)
        assert float(losses[t].detach()) == pytest.approx(draft_formula(x[t], p), rel=5e-6)
        for v in range(4):
            around = [draft_formula(x[t] + s * np.eye(4)[v], p) for s in (1e-6, -1e-6)]
            assert float(logits.grad[t, v]) == pytest.approx(
                (around[0] - around[1]) / 2e-6, rel=1e-3, abs=1e-5
            )


def test_mass_outside_the_draft_vocabulary_is_rejected_but_not_taught() -> None:
    """A drafter that has learned p' exactly still loses the mass that p gives to other tokens."""
    p = torch.tensor([[0.5, 0.2, 0.2, 0.1]])
    log_p, _ = teacher_of(p.log(), torch.eye(4), torch.tensor([True, True, False, False]))
    perfect = torch.tensor([[5.0, 2.0]]).log()
    entropy = -(5 / 7 * np.log(5 / 7) + 2 / 7 * np.log(2 / 7))
    loss, alpha = draft_losses(perfect, log_p)
    assert float(loss[0]) == pytest.approx(entropy, rel=1e-5)
    assert float(alpha[0]) == pytest.approx(0.7, rel=1e-5)
