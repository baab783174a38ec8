"""Whole sequences follow the target exactly under every verification rule; the same test detects a
bias of 0.02.

Vocabulary 4 and length 4 give 256 sequences with computable probabilities. Target and drafter are
functions of the whole context. Each sequence is generated round by round until it has 4 tokens; the
limit truncates a block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from goodness_of_fit import g_test, power
from torch import Tensor

from paceline.models import sampling
from paceline.models.sampling import DrawParams, NoiseStream, gumbel_noise, uniform_of
from paceline.services.rollout_gateway.engines.embedded import verify as rules
from paceline.services.rollout_gateway.engines.embedded.verify import (
    ChainSampler,
    Nodes,
    verify,
    verify_drawn,
)

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


def sampled(
    spoil: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None, **at_: Any
) -> Rule:
    """A chain of drafts sampled from the drafter; `at_`: temperature and masks.

    spoil(nodes' tokens [n, Q], q [n, Q, V], target's probabilities [n, Q, V]) may change tokens and
    q after the draw, which a rule must not.
    """

    def rule(contexts: Tensor, lengths: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        sampler = ChainSampler(settings(seeds, 1, **at_), PROMPT + lengths)
        tokens, at_nodes = [contexts % 4], [contexts]
        for level in range(STEPS):
            tokens.append(sampler(at(DRAFTER, at_nodes[-1]), level))
            at_nodes.append(4 * at_nodes[-1] + tokens[-1])
        drafts = torch.stack(tokens, 1)
        probs = torch.stack([*sampler.probs, torch.zeros(len(seeds), VOCAB).double()], 1)
        logits = at(TARGET, torch.stack(at_nodes, 1))
        if spoil:
            drafts, probs = spoil(drafts, probs, logits.double().softmax(-1))
        positions = PROMPT + lengths[:, None] + torch.arange(STEPS + 1)
        params = settings(seeds, STEPS + 1, **at_)
        verdict = verify_drawn(logits.flatten(0, 1), Nodes(drafts), positions, params, probs)
        return verdict.tokens, verdict.accepted

    return rule


def plain_logits(contexts: Tensor, drafts: Tensor) -> Tensor:
    return at(TARGET, contexts)


WIDE_TREE, DEEP_TREE = (3, 2), (2, 2, 2)
RULES = {
    "same draw, chain": same_draw_chain(plain_logits),
    "same draw, 3 then 2 children": same_draw_tree(WIDE_TREE),
    "same draw, 2 children, depth 3": same_draw_tree(DEEP_TREE),
    "sampled, chain": sampled(),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
def test_sequences_follow_the_target(name: str) -> None:
    result = g_test(play(RULES[name]), EXACT)
    print(f"{name}: {result}")
    assert result.df == 169
    assert result.p_value > ALPHA, result


@pytest.mark.few(1)
def test_sequences_follow_the_masked_target_at_another_temperature() -> None:
    """top_k leaves three tokens, top_p usually fewer; a sequence with any other token has
    probability 0.
    """
    probs = (TARGET.double() / 0.7).softmax(-1)
    kept = torch.zeros_like(probs)
    for context, row in enumerate(probs.tolist()):
        ordered = sorted(range(VOCAB), key=lambda token: -row[token])[:3]
        for rank, token in enumerate(ordered):
            kept[context, token] = (
                row[token] if sum(row[before] for before in ordered[:rank]) < 0.95 else 0.0
            )
    exact = probabilities(kept / kept.sum(-1, keepdim=True))
    assert (exact == 0).sum() > 100
    result = g_test(play(sampled(temperature=0.7, top_k=3, top_p=0.95)), exact)
    print(result)
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


def sampled_chain_law(bias: float) -> Tensor:
    """Return the law of the sampled chain that accepts drafts with min(1, p / q + bias)."""
    p, q = TARGET.double().softmax(-1), DRAFTER.double().softmax(-1)
    follow = q * (p / q + bias).clamp(max=1.0)
    rest = (p - q).clamp(min=0)
    return law(follow, (1 - follow.sum(-1, keepdim=True)) * rest / rest.sum(-1, keepdim=True))


def same_draw_chain_law(bias: float) -> Tensor:
    """Return the law of the same-draw chain that takes any draft with extra probability `bias`."""
    p = TARGET.double().softmax(-1)
    draft = torch.nn.functional.one_hot(DRAFTER.argmax(-1), VOCAB).double()
    biased = (1 - bias) * p + bias * draft
    return law(biased * draft, biased * (1 - draft))


def test_a_bias_of_two_hundredths_is_caught_with_power_near_one() -> None:
    for biased_law in (sampled_chain_law, same_draw_chain_law):
        torch.testing.assert_close(biased_law(0.0), EXACT)
        caught = power(SEQUENCES, EXACT, biased_law(BIAS), ALPHA)
        print(f"{biased_law.__name__}: power {caught:.6f}")
        assert caught > 0.999


def drop_unlikely(drafts: Tensor, probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Drops drafts of low confidence after they were drawn."""
    share = probs[:, :-1].gather(2, drafts[:, 1:, None])[:, :, 0]
    kept = drafts[:, 1:].masked_fill(share < 0.1, -1)
    return torch.cat((drafts[:, :1], kept), 1), probs


def accept_likely(drafts: Tensor, probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Accept every draft with a target of at least 0.5: a q of 0 wins every coin."""
    return drafts, probs.masked_fill(target >= 0.5, 0.0)


def sharper(drafts: Tensor, probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Takes another q than the drafts were drawn from."""
    other = probs**1.25
    return drafts, other / other.sum(-1, keepdim=True).clamp(min=1e-9)


def biased_logits(contexts: Tensor, drafts: Tensor) -> Tensor:
    """Return logits of a draw that takes the draft with probability 0.02 under any target."""
    draft = torch.nn.functional.one_hot(drafts, VOCAB)
    return ((1 - BIAS) * at(TARGET, contexts).softmax(-1) + BIAS * draft).log()


def lucky_coins(seeds: Tensor, positions: Tensor, tokens: Tensor, stream: NoiseStream) -> Tensor:
    return uniform_of(seeds, positions, tokens, stream) - BIAS


def coins_of_the_drafts(
    seeds: Tensor, positions: Tensor, tokens: Tensor, stream: NoiseStream
) -> Tensor:
    return uniform_of(seeds, positions, tokens, NoiseStream.DRAFT)


def noise_of_the_drafts(
    seeds: Tensor, positions: Tensor, vocab: int, stream: NoiseStream = NoiseStream.TARGET
) -> Tensor:
    return gumbel_noise(seeds, positions, vocab, NoiseStream.DRAFT)


def unchanged(p: Tensor, q: Tensor) -> Tensor:
    return p


BIASED: dict[str, tuple[Rule, dict[str, Callable[..., Tensor]]]] = {
    "same draw: the draft in 0.02 of draws": (same_draw_chain(biased_logits), {}),
    "acceptance + 0.02": (sampled(), {"uniform_of": lucky_coins}),
    "acceptance above a threshold": (sampled(accept_likely), {}),
    "unlikely drafts dropped after the draw": (sampled(drop_unlikely), {}),
    "q of another temperature": (sampled(sharper), {}),
    "p itself after a rejection": (sampled(), {"residual": unchanged}),
    "coins that are the drafts' numbers": (sampled(), {"uniform_of": coins_of_the_drafts}),
    "last draws with the drafts' noise": (sampled(), {"gumbel_noise": noise_of_the_drafts}),
}
"""A rule, and the parts of verify.py that are replaced while it plays."""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", BIASED)
def test_a_biased_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, parts = BIASED[name]
    for part, biased in parts.items():
        if hasattr(rules, part):
            monkeypatch.setattr(rules, part, biased)
        else:
            drawn = SimpleNamespace(**{**vars(sampling), part: biased})
            monkeypatch.setattr(rules, "sampling", drawn)
    result = g_test(play(rule), EXACT)
    print(f"{name}: {result}")
    assert result.p_value < ALPHA, result
