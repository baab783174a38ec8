"""Sampled drafts and their verification, node by node; tests/properties holds the law of whole
sequences.
"""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from goodness_of_fit import g_test
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_trees import SampledTree
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.models.sampling import DrawParams, behavior_logprobs, draw
from paceline.services.rollout_gateway.engines.embedded.rejection import (
    SampledVerdict,
    residual,
    sample_drafts,
    verify_sampled,
    without,
)
from paceline.services.rollout_gateway.engines.embedded.verify import Nodes, verify

VOCAB = 6
COUNTS = (3, 2)


def rows(batch: int, nodes: int, temperature: float = 1.0, **masks: float) -> DrawParams:
    each = {name: [value] * (batch * nodes) for name, value in masks.items()}
    seeds = [1000 + row for row in range(batch) for _ in range(nodes)]
    return DrawParams.of(seeds, [temperature] * (batch * nodes), **each)  # type: ignore[arg-type]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grown(
    batch: int, counts: tuple[int, ...], temperature: float = 1.0, **masks: float
) -> tuple[SampledTree, Tensor]:
    """A tree of drafts from random logits, and the positions of what is drawn at its nodes."""
    tree, positions = (
        SampledTree.of(torch.zeros(batch, dtype=torch.int64), VOCAB),
        [torch.full((batch, 1), 9)],
    )
    for depth, count in enumerate(counts):
        logits = randn(batch, tree.leaves, VOCAB, seed=depth + 1) * 2
        tree = tree.grow(
            logits, positions[-1], rows(batch, tree.leaves, temperature, **masks), count
        )
        positions.append(torch.full((batch, tree.leaves), 10 + depth))
    return tree, torch.cat(positions, dim=1)


def verified(
    tree: SampledTree, logits: Tensor, positions: Tensor, params: DrawParams
) -> SampledVerdict:
    return verify_sampled(logits, tree.tokens, tree.parents, tree.probs, positions, params)


def test_siblings_are_drawn_one_by_one_without_replacement() -> None:
    """P(a, b, c in this order) = q(a) * q(b) / (1 - q(a)) * q(c) / (1 - q(a) - q(b))."""
    n, q = 60_000, torch.tensor([0.4, 0.25, 0.2, 0.15], dtype=torch.float64)
    params = DrawParams.of(list(range(n)), [1.0] * n)
    drawn = sample_drafts(q.log().float().expand(n, -1), torch.full((n,), 3), params, 3).tokens
    orders = list(permutations(range(4), 3))
    exact = [q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b]) for a, b, c in orders]
    observed = torch.tensor([(drawn == torch.tensor(order)).all(-1).sum() for order in orders])
    assert observed.sum() == n
    result = g_test(observed, torch.stack(exact))
    assert result.df == 23
    assert result.p_value > 1e-3, result


def test_drafts_come_with_the_distribution_they_were_drawn_from() -> None:
    logits, params = randn(4, VOCAB), rows(4, 1, 0.7, top_k=2)
    drawn = sample_drafts(logits, torch.arange(4), params, 3)
    kept = logits.topk(2, dim=-1)
    expected = torch.zeros(4, VOCAB).scatter_(1, kept.indices, (kept.values / 0.7).softmax(-1))
    torch.testing.assert_close(drawn.probs.float(), expected)
    assert (drawn.tokens[:, 2] == -1).all(), "two tokens are allowed, so there is no third draft"
    assert torch.equal(drawn.tokens[:, :2].sort(-1).values, kept.indices.sort(-1).values)


@pytest.mark.parametrize("count", [0, VOCAB + 1])
def test_a_count_of_drafts_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidInput, match=f"seen: {count}; allowed: 1 to {VOCAB}"):
        sample_drafts(randn(2, VOCAB), torch.arange(2), rows(2, 1), count)


def test_a_drafter_equal_to_the_target_is_never_rejected() -> None:
    batch, logits = 500, randn(500, 4, VOCAB)
    tree = SampledTree.of(torch.zeros(batch, dtype=torch.int64), VOCAB)
    for depth in range(3):
        tree = tree.grow(
            logits[:, depth : depth + 1], torch.full((batch, 1), 9 + depth), rows(batch, 1), 1
        )
    verdict = verified(tree, logits, torch.arange(9, 13).expand(batch, -1), rows(batch, 4))
    assert (verdict.accepted == 3).all()
    assert torch.equal(verdict.tokens[:, :3], tree.tokens[:, 1:])


@pytest.mark.parametrize("counts", [(1, 1, 1), COUNTS])
def test_at_temperature_zero_the_argmax_is_followed(counts: tuple[int, ...]) -> None:
    batch = 200
    tree, positions = grown(batch, counts, temperature=0.0)
    nodes = tree.tokens.shape[1]
    logits = randn(batch, nodes, VOCAB)
    verdict = verified(tree, logits, positions, rows(batch, nodes, 0.0))
    best = logits.argmax(-1)
    assert 0 < verdict.accepted.sum() < 2 * batch
    for row in range(batch):
        node, said = 0, []
        while node >= 0:
            said.append(int(best[row, node]))
            node = next(
                (
                    i
                    for i in range(1, nodes)
                    if tree.parents[row, i] == node and tree.tokens[row, i] == said[-1]
                ),
                -1,
            )
        assert verdict.tokens[row].tolist() == said + [-1] * (nodes - len(said))


def test_a_greedy_chain_gives_what_the_same_draw_rule_gives() -> None:
    batch = 100
    tree, positions = grown(batch, (1, 1), temperature=0.0)
    logits, params = randn(batch, 3, VOCAB), rows(batch, 3, 0.0)
    got = verify_sampled(logits, tree.tokens, None, tree.probs, positions, params)
    expected = verify(logits.flatten(0, 1), Nodes(tree.tokens), positions, params)
    assert torch.equal(got.accepted, expected.accepted)
    for row, accepted in enumerate(expected.accepted.tolist()):
        assert torch.equal(got.tokens[row, : accepted + 1], expected.tokens[row, : accepted + 1])
        assert torch.equal(
            got.logprobs[row, : accepted + 1], expected.logprobs[row, : accepted + 1]
        )


def test_a_row_without_drafts_says_what_plain_decoding_draws() -> None:
    batch = 300
    logits, positions, params = (
        randn(batch, 2, VOCAB),
        torch.arange(2 * batch).view(batch, 2),
        rows(batch, 2, 0.8),
    )
    tokens = torch.tensor([[0, -1]]).expand(batch, -1)
    verdict = verify_sampled(
        logits, tokens, None, torch.zeros(batch, 2, VOCAB).double(), positions, params
    )
    plain = draw(logits[:, 0], positions[:, 0], rows(batch, 1, 0.8))
    assert torch.equal(verdict.tokens[:, 0], plain.tokens)
    assert torch.equal(verdict.logprobs[:, 0], plain.logprobs)
    assert not verdict.accepted.any()


def test_the_path_names_the_nodes_whose_logits_gave_each_token() -> None:
    batch = 100
    tree, positions = grown(batch, COUNTS)
    logits = randn(batch, 10, VOCAB) + 1
    verdict = verified(tree, logits, positions, rows(batch, 10, 0.9))
    assert set(verdict.accepted.tolist()) == {0, 1, 2}
    logprobs = behavior_logprobs(logits.view(-1, VOCAB), torch.full((batch * 10,), 0.9)).view(
        batch, 10, VOCAB
    )
    for row, accepted in enumerate(verdict.accepted.tolist()):
        path = verdict.path[row].tolist()
        assert path[accepted + 1 :] == [0] * (9 - accepted)
        for depth, node in enumerate(path[: accepted + 1]):
            assert tree.parents[row, node] == path[max(depth - 1, 0)]
            if depth:
                assert verdict.tokens[row, depth - 1] == tree.tokens[row, node]
            assert verdict.logprobs[row, depth] == logprobs[row, node, verdict.tokens[row, depth]]


def test_a_row_says_the_same_alone_and_in_a_batch() -> None:
    tree, positions = grown(40, COUNTS)
    logits = randn(40, 10, VOCAB)
    together = verified(tree, logits, positions, rows(40, 10))
    for row in range(40):
        one = slice(row, row + 1)
        params = DrawParams.of([1000 + row] * 10, [1.0] * 10)
        alone = verify_sampled(
            logits[one],
            tree.tokens[one],
            tree.parents[one],
            tree.probs[one],
            positions[one],
            params,
        )
        assert torch.equal(alone.tokens[0], together.tokens[row])


@settings(max_examples=50, deadline=None)
@given(
    top_k=st.integers(1, VOCAB),
    top_p=st.floats(0.3, 1.0),
    min_p=st.floats(0.0, 0.9),
    seed=st.integers(0, 99),
)
def test_only_tokens_that_the_masks_allow_are_said(
    top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    tree, positions = grown(20, COUNTS, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = randn(20, 10, VOCAB, seed=seed) * 2
    verdict = verified(tree, logits, positions, rows(20, 10, top_k=top_k, top_p=top_p, min_p=min_p))
    probs = logits.softmax(-1)
    for row, accepted in enumerate(verdict.accepted.tolist()):
        for token, node in zip(
            verdict.tokens[row].tolist(), verdict.path[row, : accepted + 1].tolist(), strict=False
        ):
            likelier = probs[row, node][probs[row, node] > probs[row, node, token]]
            assert len(likelier) < top_k
            assert likelier.sum() < top_p
            assert probs[row, node, token] >= min_p * probs[row, node].max() * (1 - 1e-6)


def test_residuals_stay_distributions_when_nothing_is_left() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.7, 0.2, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(
        residual(p, q), torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).double()
    )
    certain = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    left = without(certain, torch.tensor([1, 2]))
    torch.testing.assert_close(left, torch.tensor([[0.0, 0.0, 0.0], [0.4, 0.6, 0.0]]).double())
