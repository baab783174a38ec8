"""Sampled drafts and their verification; tests/properties holds the law of whole sequences."""

from __future__ import annotations

import torch
from goodness_of_fit import g_test
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.models.sampling import DrawParams, behavior_logprobs, draw
from paceline.services.rollout_gateway.engines.embedded.verify import (
    ChainSampler,
    Nodes,
    Verdict,
    residual,
    verify,
    verify_drawn,
)

VOCAB, STEPS, FIRST = 6, 3, 9


def rows(batch: int, nodes: int = 1, temperature: float = 1.0, **masks: float) -> DrawParams:
    each = {name: [value] * (batch * nodes) for name, value in masks.items()}
    seeds = [1000 + row for row in range(batch) for _ in range(nodes)]
    return DrawParams.of(seeds, [temperature] * (batch * nodes), **each)  # type: ignore[arg-type]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """Chains of drafts [B, STEPS + 1] behind token 0, and their q [B, STEPS + 1, V].

    logits [B, STEPS, V]: of the drafter.
    """
    batch = len(logits)
    sampler = ChainSampler(params, torch.full((batch,), FIRST))
    tokens = [sampler(logits[:, level], level) for level in range(STEPS)]
    last = torch.zeros(batch, VOCAB, dtype=torch.float64)
    drafts = torch.stack([torch.zeros(batch, dtype=torch.int64), *tokens], 1)
    return drafts, torch.stack([*sampler.probs, last], 1)


def verified(drafts: Tensor, probs: Tensor, logits: Tensor, params: DrawParams) -> Verdict:
    positions = torch.arange(FIRST, FIRST + drafts.shape[1]).expand(len(drafts), -1)
    return verify_drawn(logits.flatten(0, 1), Nodes(drafts), positions, params, probs)


def test_drafts_follow_the_drafters_distribution() -> None:
    n, q = 60_000, torch.tensor([0.4, 0.25, 0.2, 0.15], dtype=torch.float64)
    params = DrawParams.of(list(range(n)), [1.0] * n)
    sampler = ChainSampler(params, torch.full((n,), 3))
    tokens = sampler(q.log().float().expand(n, -1), 0)
    result = g_test(torch.bincount(tokens, minlength=4), q)
    assert result.p_value > 1e-3, result


def test_drafts_come_with_the_distribution_they_were_drawn_from() -> None:
    logits = randn(4, VOCAB)
    sampler = ChainSampler(rows(4, 1, 0.7, top_k=2), torch.arange(4))
    tokens = sampler(logits, 0)
    kept = logits.topk(2, dim=-1)
    expected = torch.zeros(4, VOCAB).scatter_(1, kept.indices, (kept.values / 0.7).softmax(-1))
    torch.testing.assert_close(sampler.probs[0].float(), expected)
    assert (tokens[:, None] == kept.indices).any(-1).all()


def test_a_drafter_equal_to_the_target_is_never_rejected() -> None:
    batch, logits = 500, randn(500, STEPS + 1, VOCAB)
    drafts, probs = drawn(logits[:, :STEPS], rows(batch))
    verdict = verified(drafts, probs, logits, rows(batch, STEPS + 1))
    assert (verdict.accepted == STEPS).all()
    assert torch.equal(verdict.tokens[:, :STEPS], drafts[:, 1:])


def test_a_greedy_chain_gives_the_same_tokens_as_the_same_draw_rule() -> None:
    batch = 200
    drafts, probs = drawn(randn(batch, STEPS, VOCAB, seed=1), rows(batch, 1, 0.0))
    logits, params = randn(batch, STEPS + 1, VOCAB), rows(batch, STEPS + 1, 0.0)
    got = verified(drafts, probs, logits, params)
    positions = torch.arange(FIRST, FIRST + STEPS + 1).expand(batch, -1)
    expected = verify(logits.flatten(0, 1), Nodes(drafts), positions, params)
    assert 0 < got.accepted.sum() < STEPS * batch
    assert torch.equal(got.accepted, expected.accepted)
    for row, accepted in enumerate(expected.accepted.tolist()):
        end = accepted + 1
        assert torch.equal(got.tokens[row, :end], expected.tokens[row, :end])
        assert (got.tokens[row, end:] == -1).all()
        assert torch.equal(got.logprobs[row, :end], expected.logprobs[row, :end])


def test_a_row_without_drafts_draws_as_plain_decoding() -> None:
    batch = 300
    logits, params = randn(batch, 2, VOCAB), rows(batch, 2, 0.8)
    tokens = torch.tensor([[0, -1]]).expand(batch, -1)
    verdict = verified(tokens, torch.zeros(batch, 2, VOCAB).double(), logits, params)
    plain = draw(logits[:, 0], torch.full((batch,), FIRST), rows(batch, 1, 0.8))
    assert torch.equal(verdict.tokens[:, 0], plain.tokens)
    assert torch.equal(verdict.logprobs[:, 0], plain.logprobs)
    assert not verdict.accepted.any()


def test_log_probs_are_those_of_the_target_at_each_node() -> None:
    batch = 100
    drafts, probs = drawn(randn(batch, STEPS, VOCAB, seed=1), rows(batch))
    logits = randn(batch, STEPS + 1, VOCAB)
    verdict = verified(drafts, probs, logits, rows(batch, STEPS + 1, 0.9))
    assert set(verdict.accepted.tolist()) == set(range(STEPS + 1))
    temperatures = torch.full((batch * (STEPS + 1),), 0.9)
    logprobs = behavior_logprobs(logits.flatten(0, 1), temperatures).view(logits.shape)
    for row, accepted in enumerate(verdict.accepted.tolist()):
        assert torch.equal(verdict.tokens[row, :accepted], drafts[row, 1 : accepted + 1])
        for node in range(accepted + 1):
            assert verdict.logprobs[row, node] == logprobs[row, node, verdict.tokens[row, node]]


def test_a_rejected_draft_is_not_drawn_in_its_own_place() -> None:
    batch = 400
    drafts, probs = drawn(randn(batch, STEPS, VOCAB, seed=1), rows(batch))
    verdict = verified(drafts, probs, randn(batch, STEPS + 1, VOCAB), rows(batch, STEPS + 1))
    for node in range(STEPS):
        rejected = verdict.accepted == node
        assert rejected.any()
        assert (verdict.tokens[rejected, node] != drafts[rejected, node + 1]).all()


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    drafts, probs = drawn(randn(40, STEPS, VOCAB, seed=1), rows(40))
    logits = randn(40, STEPS + 1, VOCAB)
    together = verified(drafts, probs, logits, rows(40, STEPS + 1))
    for row in range(40):
        one = slice(row, row + 1)
        params = DrawParams.of([1000 + row] * (STEPS + 1), [1.0] * (STEPS + 1))
        alone = verified(drafts[one], probs[one], logits[one], params)
        assert torch.equal(alone.tokens[0], together.tokens[row])


@settings(max_examples=50, deadline=None)
@given(
    top_k=st.integers(1, VOCAB),
    top_p=st.floats(0.3, 1.0),
    min_p=st.floats(0.0, 0.9),
    seed=st.integers(0, 99),
)
def test_only_tokens_that_the_masks_allow_are_emitted(
    top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    masks = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    drafts, probs = drawn(2 * randn(20, STEPS, VOCAB, seed=100), rows(20, **masks))
    logits = 2 * randn(20, STEPS + 1, VOCAB, seed=seed)
    verdict = verified(drafts, probs, logits, rows(20, STEPS + 1, **masks))
    target = logits.softmax(-1)
    for row, accepted in enumerate(verdict.accepted.tolist()):
        for node, token in enumerate(verdict.tokens[row, : accepted + 1].tolist()):
            likelier = target[row, node][target[row, node] > target[row, node, token]]
            assert len(likelier) < top_k
            assert likelier.sum() < top_p
            assert target[row, node, token] >= min_p * target[row, node].max() * (1 - 1e-6)


def test_a_residual_stays_a_distribution_when_nothing_is_left() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.7, 0.2, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).double()
    torch.testing.assert_close(residual(p, q), expected)
