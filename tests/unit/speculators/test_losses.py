"""The loss is the formula of its docstring, over the draftable likeliest tokens and their rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.models.config import ModelConfig
from paceline.speculators import packed
from paceline.speculators.eagle import EagleNet, EagleOptions
from paceline.speculators.net import soft_losses
from paceline.speculators.packed import PackedRow

V, H = 9, 5


def row_of(states: np.ndarray, head: np.ndarray, valid: np.ndarray | None = None) -> PackedRow:
    count = len(states)
    zeros = torch.zeros(count, dtype=torch.int64)
    row = PackedRow(
        states=torch.tensor(states),
        next_states=torch.tensor(states),
        next_tokens=zeros,
        draft_tokens=zeros,
        positions=torch.arange(count),
        documents=zeros,
        valid=torch.ones(count, dtype=torch.bool) if valid is None else torch.tensor(valid),
        lm_head_hash="",
    )
    return row.taught(torch.tensor(head))


def formula(x: np.ndarray, p: np.ndarray, t2d: np.ndarray, k: int) -> float:
    """Return the loss of one position in float64. x: logits of the draftable tokens; p: the
    policy's probabilities of all tokens.
    """
    q = np.zeros(len(p))
    q[t2d] = np.exp(x) / np.exp(x).sum()
    top = [v for v in np.argsort(-p)[:k] if t2d[v]]
    rest = 1 - np.sort(p)[::-1][:k].sum() if k < len(p) else 0.0
    mass = p[top].sum() + rest
    loss = -sum(p[v] / mass * np.log(q[v]) for v in top)
    return float(loss - (rest / mass * np.log(1 - q[top].sum()) if rest else 0.0))


@pytest.mark.parametrize("k", [3, V])
@pytest.mark.parametrize("drafted", [[1, 3, 4, 8], [*range(V)]])
def test_losses_and_gradients_are_those_of_the_formula(
    k: int, drafted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "TOP", k)
    draw = np.random.default_rng(1)
    states, head = draw.normal(0, 1, (6, H)), draw.normal(0, 1, (V, H))
    x, t2d = draw.normal(0, 2, (6, len(drafted))), np.isin(np.arange(V), drafted)
    ids = torch.tensor(np.where(t2d, t2d.cumsum() - 1, -1))
    row, logits = row_of(states, head), torch.tensor(x, requires_grad=True)
    losses, right, alphas = soft_losses(logits, row, torch.arange(6), None if t2d.all() else ids)
    losses.sum().backward()
    assert logits.grad is not None
    for t in range(6):
        p = np.exp(head @ states[t]) / np.exp(head @ states[t]).sum()
        q = np.exp(x[t]) / np.exp(x[t]).sum()
        assert float(losses[t].detach()) == pytest.approx(formula(x[t], p, t2d, k), rel=5e-6)
        assert bool(right[t]) == (drafted[int(q.argmax())] == int(p.argmax()))
        top = np.argsort(-p)[:k]
        alpha = sum(min(p[v], q[drafted.index(v)]) for v in top if v in drafted)
        assert float(alphas[t]) == pytest.approx(alpha, rel=5e-6)
        for v in range(len(drafted)):
            step = 1e-6 * np.eye(len(drafted))[v]
            ends = [formula(x[t] + sign * step, p, t2d, k) for sign in (1, -1)]
            assert float(logits.grad[t, v]) == pytest.approx(
                (ends[0] - ends[1]) / 2e-6, rel=1e-3, abs=1e-5
            )


def test_with_all_tokens_the_loss_is_the_full_cross_entropy() -> None:
    draw = np.random.default_rng(2)
    states, head = draw.normal(0, 1, (7, H)), draw.normal(0, 1, (V, H))
    logits = torch.tensor(draw.normal(0, 2, (7, V)))
    losses, _, _ = soft_losses(logits, row_of(states, head), torch.arange(7))
    p = torch.softmax(torch.tensor(states @ head.T), dim=-1)
    full = -(p * torch.log_softmax(logits, dim=-1)).sum(-1)
    torch.testing.assert_close(losses, full, rtol=1e-6, atol=1e-6)


def test_mass_outside_the_draft_vocabulary_is_rejected_but_not_taught() -> None:
    """A drafter that has learned p' exactly still loses the mass that p gives to other tokens."""
    p = np.log([[0.5, 0.2, 0.2, 0.1]])
    perfect = torch.tensor([[5.0, 2.0]]).log()
    entropy = -(5 / 7 * np.log(5 / 7) + 2 / 7 * np.log(2 / 7))
    loss, right, alpha = soft_losses(
        perfect, row_of(p, np.eye(4)), torch.tensor([0]), torch.tensor([0, 1, -1, -1])
    )
    assert float(loss[0]) == pytest.approx(entropy, rel=1e-5)
    assert float(alpha[0]) == pytest.approx(0.7, rel=1e-5)
    assert bool(right[0])


CONFIG = ModelConfig(
    family="llama",
    vocab_size=V,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("size", [0, 4])
def test_eagle_objective_counts_valid_positions_and_draftable_targets_of_a_chain(size: int) -> None:
    draw = np.random.default_rng(3)
    states, head = (draw.normal(0, 1, (n, 8)).astype(np.float32) for n in (10, V))
    valid = draw.random(10) < 0.7
    weights = {"feature_weight": 0.3, "token_weight": 0.4, "ttt_decay": 0.7}
    options = EagleOptions(draft_vocab_size=size, ttt_steps=3, **weights)
    net = EagleNet.fresh(CONFIG, options, 0)
    net.bind(torch.tensor(head), torch.tensor(head))
    row = row_of(states, head, valid)
    sums = net(row)
    chain = [one.detach().double().numpy() for one, _, _ in net.unroll(row, 3)]
    ids = [*range(V)] if net.token_ids is None else net.token_ids.tolist()
    t2d, expected = np.isin(np.arange(V), ids), 0.0
    assert len(ids) == (size or V)
    for step, features in enumerate(chain):
        for t in np.flatnonzero(valid[step:]):
            d = np.abs(features[t] - states[t + step])
            loss = 0.3 * float(np.where(d < 1, 0.5 * d * d, d - 0.5).mean())
            z = head.astype(np.float64) @ states[t + step]
            p = np.exp(z) / np.exp(z).sum()
            if t2d[p.argmax()]:
                loss += 0.4 * formula(head[ids] @ features[t], p, t2d, V)
            expected += 0.7**step * loss
    assert float(sums.loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert int(sums.positions) == valid.sum()
