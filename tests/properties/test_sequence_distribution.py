"""Whole sequences follow the target exactly, whatever the rule; a rule biased by 0.02 is caught by the same test.

Vocabulary 4 and length 4, so that all 256 sequences and their probabilities are known. Target and drafter are functions
of the whole context. Every sequence is played round by round until it has 4 tokens; a block is cut at the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from goodness_of_fit import GTest, g_test, power
from torch import Tensor

from paceline.models.sampling import DrawParams, Stream, gumbel_noise, uniform_of
from rollout_gateway.engines.embedded import rejection
from rollout_gateway.engines.embedded.rejection import SampledTree, verify_sampled
from rollout_gateway.engines.embedded.verify import verify

VOCAB, LENGTH, PROMPT = 4, 4, 7
ALPHA, SEQUENCES, BIAS = 1e-3, 200_000, 0.02
STEPS = 3

# A context is the number 1 followed by its tokens as digits to base 4; one longer than three tokens counts as its last
# three, which no exact probability needs.
_GENERATOR = torch.Generator().manual_seed(11)
TARGET = 1.5 * torch.randn(128, VOCAB, generator=_GENERATOR)
DRAFTER = 0.7 * TARGET + 0.7 * torch.randn(128, VOCAB, generator=_GENERATOR)

Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(contexts, lengths, seeds: int64 [n]) -> tokens [n, Q], of which accepted [n] + 1 are said."""


def at(table: Tensor, contexts: Tensor) -> Tensor:
    return table[torch.where(contexts < 128, contexts, 64 + contexts % 64)]


def probabilities(table: Tensor) -> Tensor:
    """Of all sequences, float64 [256], from the next-token probabilities [128, V] of every context."""
    total = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        contexts = torch.arange(4**length, 2 * 4**length)
        total = (total[:, None] * table[contexts]).reshape(-1)
    return total


EXACT = probabilities(TARGET.double().softmax(-1))


def settings(seeds: Tensor, nodes: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> DrawParams:
    """Of `nodes` draws of each sequence."""
    rows = len(seeds) * nodes
    return DrawParams(
        seeds.repeat_interleave(nodes),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.zeros(rows),
        any_greedy=False,
        any_masked=bool(top_k) or top_p < 1,
    )


def play(rule: Rule) -> Tensor:
    """How often each sequence is said, [256]."""
    seeds = torch.arange(SEQUENCES)
    contexts, lengths = torch.ones_like(seeds), torch.zeros_like(seeds)
    while (running := (lengths < LENGTH).nonzero()[:, 0]).numel():
        tokens, accepted = rule(contexts[running], lengths[running], seeds[running])
        for column in range(tokens.shape[1]):
            said = running[(column <= accepted) & (lengths[running] < LENGTH)]
            if said.numel():
                contexts[said] = 4 * contexts[said] + tokens[torch.searchsorted(running, said), column]
                lengths[said] += 1
    return torch.bincount(contexts - 4**LENGTH, minlength=4**LENGTH)


def same_draw_chain(logits_of: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """verify.py on the drafter's most likely chain; logits_of(contexts [n], drafts [n]) -> [n, V]."""

    def rule(contexts: Tensor, lengths: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        drafts, logits = [], []
        for _ in range(STEPS):
            drafts.append(at(DRAFTER, contexts).argmax(-1))
            logits.append(logits_of(contexts, drafts[-1]))
            contexts = 4 * contexts + drafts[-1]
        logits.append(at(TARGET, contexts))
        positions = PROMPT + lengths[:, None] + torch.arange(STEPS + 1)
        verdict = verify(torch.stack(logits, 1), torch.stack(drafts, 1), positions, settings(seeds, STEPS + 1))
        return verdict.tokens, verdict.accepted

    return rule


def sampled(counts: tuple[int, ...], spoil: Callable[[SampledTree, Tensor], SampledTree] | None = None, **at_: Any) -> Rule:
    """Drafts sampled from the drafter, counts[d] children at every node of depth d; `at_`: temperature and masks.

    spoil(tree, target's probabilities [n, Q, V]) may change the drafts after they were drawn, which a rule must not.
    """

    def rule(contexts: Tensor, lengths: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        tree = SampledTree.of(contexts % 4, VOCAB)
        at_nodes, depths = contexts[:, None], [0]
        for depth, count in enumerate(counts):
            leaves = at_nodes[:, -tree.leaves :]
            positions = (PROMPT + lengths + depth)[:, None].expand(-1, tree.leaves)
            tree = tree.grow(at(DRAFTER, leaves), positions, settings(seeds, tree.leaves, **at_), count)
            depths += [depth + 1] * tree.leaves
            children = 4 * leaves.repeat_interleave(count, dim=1) + tree.tokens[:, -tree.leaves :].clamp(min=0)
            at_nodes = torch.cat((at_nodes, children), dim=1)
        logits = at(TARGET, at_nodes)
        tree = spoil(tree, logits.double().softmax(-1)) if spoil else tree
        positions = PROMPT + lengths[:, None] + torch.tensor(depths)
        verdict = verify_sampled(
            logits, tree.tokens, tree.parents, tree.probs, positions, settings(seeds, len(depths), **at_)
        )
        return verdict.tokens, verdict.accepted

    return rule


def plain_logits(contexts: Tensor, drafts: Tensor) -> Tensor:
    return at(TARGET, contexts)


CHAIN, WIDE_TREE, DEEP_TREE = (1,) * STEPS, (3, 2), (2, 2, 2)
RULES = {
    "same draw, chain": same_draw_chain(plain_logits),
    "sampled, chain": sampled(CHAIN),
    "sampled, 3 then 2 siblings": sampled(WIDE_TREE),
    "sampled, 2 siblings, depth 3": sampled(DEEP_TREE),
}


@pytest.mark.parametrize("name", RULES)
def test_sequences_follow_the_target(name: str) -> None:
    result = g_test(play(RULES[name]), EXACT)
    print(name, result)
    assert result.df > 200
    assert result.p_value > ALPHA, result
