"""The EAGLE-3 network and its training-time test, against float64 numpy written from the paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from unit.drafter_trainer.samples import chain_logits
from unit.speculators.eagle3_rows import (
    TARGET,
    Array,
    arrays,
    chain_from,
    document,
    inner_of,
    packed,
    rough_net,
    softmax,
)

from paceline.errors import DataLoss
from paceline.speculators.eagle3 import Eagle3Net
from paceline.speculators.packed import PackedRow

STEPS = 4


def position_loss(p: Array, logits: Array, ids: Array) -> tuple[float, float]:
    """Loss and alpha of one position from the target's full p [V] and the drafter's logits [Vd]."""
    q, own = softmax(logits), p[ids]
    taught, alpha = own / own.sum(), float(np.minimum(own, q).sum())
    return float(-(taught * np.log(q)).sum()), alpha


def formula(
    w: dict[str, Array], rows: list[PackedRow], options: dict[str, Any]
) -> dict[str, float]:
    """Sums of the training-time test over documents, one position and one step at a time."""
    ids = (w["d2t"] + np.arange(len(w["d2t"]))).astype(int)
    terms = {f"loss_{i}": 0.0 for i in range(STEPS)} | {"loss": 0.0, "correct": 0.0, "alpha": 0.0}
    for row in rows:
        tokens, inner = row.next_tokens.tolist(), inner_of(row)
        teachers = [softmax(w["head"] @ state) for state in row.next_states.double().numpy()]
        for t in range(len(row)):
            chain = chain_from(
                w, inner, tokens, t, STEPS, bool(options.get("norm_before_residual"))
            )
            for i, logits in enumerate(chain):
                p = teachers[t + i]
                if not row.valid[t + i] or p.argmax() not in ids:
                    continue
                loss, alpha = position_loss(p, logits, ids)
                terms["loss"] += 0.8**i * loss
                terms[f"loss_{i}"] += loss
                if i == 0:
                    terms["alpha"] += alpha
                    terms["correct"] += ids[logits.argmax()] == p.argmax()
    return terms


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab_size": 21},
        {"draft_vocab_size": 21, "norm_before_residual": True},
    ],
)
def test_loss_is_the_papers_training_time_test_over_packed_documents(
    options: dict[str, Any],
) -> None:
    net = rough_net(ttt_steps=STEPS, **options)
    rows = [document(9, 1), document(2, 2), document(11, 3)]
    loss, positions, terms = net(packed(rows))
    expected = formula(arrays(net), rows, options)
    assert float(loss.detach()) == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert int(positions) == sum(int(row.valid.sum()) for row in rows)
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        assert float(terms[name]) == pytest.approx(value, rel=1e-5), name


def test_gradients_are_those_of_the_formula() -> None:
    net = rough_net(ttt_steps=STEPS, draft_vocab_size=21)
    rows = [document(4, 1), document(3, 2)]
    net(packed(rows)).loss.backward()
    w, named = arrays(net), dict(net.named_parameters())
    places = [
        ("fc.weight", (3, 20)),
        ("midlayer.self_attn.k_proj.weight", (2, 25)),
        ("midlayer.hidden_norm.weight", (4,)),
        ("midlayer.mlp.down_proj.weight", (1, 7)),
        ("lm_head.weight", (6, 2)),
    ]
    for name, place in places:
        slopes = []
        for move in (1e-5, -1e-5):
            moved = w[name].copy()
            moved[place] += move
            slopes.append(formula({**w, name: moved}, rows, {})["loss"] / (2 * move))
        gradient = named[name].grad
        assert gradient is not None
        assert float(gradient[place]) == pytest.approx(sum(slopes), rel=1e-3, abs=1e-4)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_chain_logits_are_those_of_the_formula_and_never_outside_the_draft_vocabulary() -> None:
    net, row = rough_net(draft_vocab_size=21), document(10, 4)
    with torch.no_grad():
        chain = chain_logits(net, row, STEPS)
    outside = ~torch.isin(torch.arange(TARGET.vocab_size), net.token_ids)
    w, inner = arrays(net), inner_of(row)
    for t in range(len(row)):
        expected = chain_from(w, inner, row.next_tokens.tolist(), t, STEPS)
        for logits, one in zip(chain, expected, strict=False):
            np.testing.assert_allclose(logits[t, net.token_ids].numpy(), one, atol=2e-4)
            assert torch.isneginf(logits[t, outside]).all()


TIE = 1e-4
"""A gap of log-probabilities that rounding does not close."""


def gradients(net: Eagle3Net, rows: list[PackedRow]) -> dict[str, torch.Tensor]:
    net.zero_grad()
    for row in rows:
        net(row).loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def smallest_gap(net: Eagle3Net, row: PackedRow, monkeypatch: pytest.MonkeyPatch) -> float:
    """Between p and q of min(p, q), in logarithms; infinite for losses without.

    At a tie the gradient jumps.
    """
    gaps: list[float] = []
    plain = torch.minimum

    def noted(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if p.numel():
            gaps.append(float((p.log() - q.log()).nan_to_num(torch.inf).abs().min()))
        return plain(p, q)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(torch, "minimum", noted)
        net(row)
    return min(gaps, default=float("inf"))


def test_packed_documents_learn_as_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    net = rough_net(draft_vocab_size=21)
    drawn = (
        [document(9, seed), document(1, seed + 1), document(13, seed + 2)] for seed in range(1, 100)
    )
    rows = next(rows for rows in drawn if smallest_gap(net, packed(rows), monkeypatch) > TIE)
    with torch.no_grad():
        together, apart = net(packed(rows)), [net(row) for row in rows]
    assert float(together.loss) == pytest.approx(sum(float(one.loss) for one in apart), rel=1e-5)
    for name, value in together.terms.items():
        assert float(value) == pytest.approx(sum(float(one.terms[name]) for one in apart), rel=1e-5)
    of_packed, of_separate = gradients(net, [packed(rows)]), gradients(net, rows)
    for name, gradient in of_separate.items():
        torch.testing.assert_close(
            of_packed[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())
        )


def changed(net: Eagle3Net, row: PackedRow, other: PackedRow) -> list[set[int]]:
    """Return for each step the positions with different predictions in `other`."""
    with torch.no_grad():
        pairs = zip(chain_logits(net, row, STEPS), chain_logits(net, other, STEPS), strict=True)
        return [set((a != b).any(-1).nonzero()[:, 0].tolist()) for a, b in pairs]


def test_a_token_or_state_changes_no_earlier_prediction_and_no_neighbour() -> None:
    net, row = rough_net(), packed([document(8, 1), document(8, 2), document(8, 3)])
    at, first, last = 11, 8, 15
    tokens = row.next_tokens.clone()
    tokens[at] = (tokens[at] + 1) % TARGET.vocab_size
    drafts = row.draft_tokens.clone()
    drafts[at - 1] = tokens[at]
    of_token = changed(net, row, replace(row, next_tokens=tokens, draft_tokens=drafts))
    states = row.states.clone()
    states[at] += 1.0
    of_state = changed(net, row, replace(row, states=states))
    for step in range(STEPS):
        # Rows with a chain that leaves the document mean nothing, but must not affect other rows.
        reads_token = {t for t in range(first, last + 1) if t + step >= at}
        reads_state = set(range(at, last + 1))
        inside = set(range(first, last + 1 - step))
        assert of_token[step] <= reads_token
        assert of_token[step] & inside == reads_token & inside
        assert of_state[step] <= reads_state
        assert of_state[step] & inside == reads_state & inside


def test_a_row_without_drafting_targets_costs_nothing() -> None:
    net, row = rough_net(), document(5, 1)
    loss, positions, _ = net(replace(row, valid=torch.zeros(5, dtype=torch.bool)))
    loss.backward()
    assert (float(loss.detach()), int(positions)) == (0.0, 0)
    assert not any(p.grad.any() for p in net.parameters() if p.grad is not None)


def test_rows_without_the_inner_states_are_refused_by_name() -> None:
    net, row = rough_net(), document(5, 1)
    h = TARGET.hidden_size
    with pytest.raises(DataLoss, match="lack states the drafter reads: 2, 4, 5"):
        net(replace(row, states=row.states[:, -h:], layers="last"))
    with pytest.raises(DataLoss, match="reads: 4;"):
        net(replace(row, layers="1,2,3,5,last"))
    with pytest.raises(DataLoss, match="width"):
        net(replace(row, states=row.states[:, h:]))


def test_columns_are_found_by_name_in_any_order_of_states() -> None:
    net, row = rough_net(), document(6, 1)
    one, two, four, five, last = row.states.chunk(5, dim=1)
    shuffled = replace(
        row, states=torch.cat((five, one, four, two, last), dim=1), layers="5,1,4,2,last"
    )
    assert torch.equal(net.states_read(row), torch.cat((two, four, five), dim=1))
    assert torch.equal(net.states_read(shuffled), net.states_read(row))
