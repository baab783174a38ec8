"""Whole sequences follow the target exactly, for chains and trees of drafts; the same test detects a
bias of 0.02.

Vocabulary 4 and length 4 give 256 sequences with computable probabilities. Target and drafter are
functions of the whole context. Each sequence is generated round by round until it has 4 tokens; the
limit truncates a block.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from goodness_of_fit import g_test, power
from torch import Tensor

from paceline.models import sampling
from paceline.models.sampling import DrawParams
from paceline.services.rollout_gateway.engines.embedded.verify import Nodes, verify

VOCAB, LENGTH, PROMPT = 4, 4, 7
ALPHA, SEQUENCES, BIAS = 1e-3, 60_000, 0.02
STEPS = 3

# A context is the number 1 followed by its tokens as digits to base 4; one longer than three tokens
# counts as its last three, which no exact probability needs.
_GENERATOR = torch.Generator().manual_seed(13)
TARGET = 1.5 * torch.randn(128, VOCAB, generator=_GENERATOR)
DRAFTER = 0.7 * TARGET + 0.8 * torch.randn(128, VOCAB, generator=_GENERATOR)

Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(contexts, lengths, seeds: int64 [n]) -> tokens [n, Q], accepted [n]; accepted + 1 are emitted.
"""


def at(table: Tensor, contexts: Tensor) -> Tensor:
    return table[torch.where(contexts < 128, contexts, 64 + contexts % 64)]


def probabilities(table: Tensor) -> Tensor:
    """Return the probability of every sequence, float64 [256], from the next-token probabilities
    [128, V] of every context.
    """
    total = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        contexts = torch.arange(4**length, 2 * 4**length)
        total = (total[:, None] * table[contexts]).reshape(-1)
    return total


EXACT = probabilities(TARGET.double().softmax(-1))


def settings(
    seeds: Tensor, nodes: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> DrawParams:
    """Return the parameters of `nodes` draws of each sequence."""
    rows = len(seeds) * nodes
    drawn = seeds.repeat_interleave(nodes).tolist()
    return DrawParams.of(drawn, [temperature] * rows, top_k=[top_k] * rows, top_p=[top_p] * rows)


def play(rule: Rule) -> Tensor:
    """Return the frequency of each sequence, [256]."""
    seeds = torch.arange(SEQUENCES)
    contexts, lengths = torch.ones_like(seeds), torch.zeros_like(seeds)
    while (running := (lengths < LENGTH).nonzero()[:, 0]).numel():
        tokens, accepted = rule(contexts[running], lengths[running], seeds[running])
        for column in range(tokens.shape[1]):
            said = running[(column <= accepted) & (lengths[running] < LENGTH)]
            if said.numel():
                contexts[said] = (
                    4 * contexts[said] + tokens[torch.searchsorted(running, said), column]
                )
                lengths[said] += 1
    return torch.bincount(contexts - 4**LENGTH, minlength=4**LENGTH)


def same_draw_chain(logits_of: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """verify.py on the drafter's most likely chain; logits_of(contexts [n], drafts [n]) -> [n,
    V].
    """

    def rule(contexts: Tensor, lengths: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        drafts, logits = [], []
        for _ in range(STEPS):
            drafts.append(at(DRAFTER, contexts).argmax(-1))
            logits.append(logits_of(contexts, drafts[-1]))
            contexts = 4 * contexts + drafts[-1]
        logits.append(at(TARGET, contexts))
        positions = PROMPT + lengths[:, None] + torch.arange(STEPS + 1)
        nodes = Nodes(
            torch.stack((drafts[0], *drafts), 1)
        )  # the root's own token is never looked at
        verdict = verify(
            torch.stack(logits, 1).flatten(0, 1), nodes, positions, settings(seeds, STEPS + 1)
        )
        return verdict.tokens, verdict.accepted

    return rule


def same_draw_tree(counts: tuple[int, ...]) -> Rule:
    """verify.py on the drafter's counts[d] most likely children at every node of depth d."""

    def rule(contexts: Tensor, lengths: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        at_nodes, tokens, parents, leaves = contexts[:, None], [contexts[:, None] % 4], [0], [0]
        for count in counts:
            children = at(DRAFTER, at_nodes[:, leaves]).topk(count, dim=-1).indices.flatten(1)
            tokens.append(children)
            parents += [leaf for leaf in leaves for _ in range(count)]
            ends = 4 * at_nodes[:, leaves].repeat_interleave(count, dim=1) + children
            leaves = list(range(at_nodes.shape[1], at_nodes.shape[1] + ends.shape[1]))
            at_nodes = torch.cat((at_nodes, ends), dim=1)
        above = torch.tensor(parents).expand(len(seeds), -1)
        nodes = Nodes(torch.cat(tokens, dim=1), above, sampling.node_depths(above, above))
        logits = at(TARGET, at_nodes).flatten(0, 1)
        verdict = verify(
            logits, nodes, nodes.positions(PROMPT + lengths), settings(seeds, len(parents))
        )
        return verdict.tokens, verdict.accepted

    return rule


def plain_logits(contexts: Tensor, drafts: Tensor) -> Tensor:
    return at(TARGET, contexts)


WIDE_TREE, DEEP_TREE = (3, 2), (2, 2, 2)
RULES = {
    "same draw, chain": same_draw_chain(plain_logits),
    "same draw, 3 then 2 children": same_draw_tree(WIDE_TREE),
    "same draw, 2 children, depth 3": same_draw_tree(DEEP_TREE),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
def test_sequences_follow_the_target(name: str) -> None:
    result = g_test(play(RULES[name]), EXACT)
    print(f"{name}: {result}")
    assert result.df == 169
    assert result.p_value > ALPHA, result


def law(follow: Tensor, stop: Tensor, steps: int = STEPS) -> Tensor:
    """Return the distribution of sequences under a chain rule, float64 [256].

    At each context the rule follows the draft or stops with a token, at the probabilities follow
    and stop [128, V]. Both sum to 1 at every context. After `steps` followed drafts the target
    draws a token.
    """
    target = TARGET.double().softmax(-1)
    followed = {
        0: torch.ones(1, dtype=torch.float64)
    }  # drafts followed in the block -> probability of each context
    for length in range(LENGTH):
        contexts = torch.arange(4**length, 2 * 4**length)
        after: dict[int, Tensor] = {}
        for done, mass in followed.items():
            last = done == steps
            ends = (mass[:, None] * (target if last else stop)[contexts]).reshape(-1)
            after[0] = after.get(0, 0) + ends
            if not last:
                after[done + 1] = after.get(done + 1, 0) + (
                    mass[:, None] * follow[contexts]
                ).reshape(-1)
        followed = after
    return torch.stack(list(followed.values())).sum(0)


def same_draw_chain_law(bias: float) -> Tensor:
    """Return the law of the same-draw chain that takes any draft with extra probability `bias`."""
    p = TARGET.double().softmax(-1)
    draft = torch.nn.functional.one_hot(DRAFTER.argmax(-1), VOCAB).double()
    biased = (1 - bias) * p + bias * draft
    return law(biased * draft, biased * (1 - draft))


def test_a_bias_of_two_hundredths_is_caught_with_power_near_one() -> None:
    torch.testing.assert_close(same_draw_chain_law(0.0), EXACT)
    assert power(SEQUENCES, EXACT, same_draw_chain_law(BIAS), ALPHA) > 0.999


def biased_logits(contexts: Tensor, drafts: Tensor) -> Tensor:
    """Return logits of a draw that takes the draft with probability 0.02 under any target."""
    draft = torch.nn.functional.one_hot(drafts, VOCAB)
    return ((1 - BIAS) * at(TARGET, contexts).softmax(-1) + BIAS * draft).log()


@pytest.mark.few(1)
def test_a_rule_that_takes_the_draft_in_two_hundredths_of_draws_is_caught() -> None:
    result = g_test(play(same_draw_chain(biased_logits)), EXACT)
    assert result.p_value < ALPHA, result
