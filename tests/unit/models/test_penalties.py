"""Penalties and logit bias against transformers, against the written formulas in float64, and at
every draft node.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from paceline.models.sampling import add_bias_, node_counts, node_depths, penalised

VOCAB = 7


def path_counts(base: list[int], tokens: list[int], parents: list[int], node: int) -> list[int]:
    """Counts at a node by walking from it to the root; where there is no node nothing is added."""
    counts = Counter(dict(enumerate(base)))
    while node > 0:
        if tokens[node] >= 0 and parents[node] >= 0:
            counts[tokens[node]] += 1
        node = max(parents[node], 0)
    return [counts[token] for token in range(VOCAB)]


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_counts_at_a_node_are_those_of_the_path_to_it(
    seed: int, batch: int, nodes: int, chain: bool
) -> None:
    source = random.Random(seed)
    base = [[source.randrange(4) for _ in range(VOCAB)] for _ in range(batch)]
    tokens = [
        [source.randrange(VOCAB)] + [source.randrange(-1, VOCAB) for _ in range(nodes - 1)]
        for _ in range(batch)
    ]
    chained = [list(range(-1, nodes - 1)) for _ in range(batch)]
    drawn = [
        [-1, *(source.randrange(-1, number) for number in range(1, nodes))] for _ in range(batch)
    ]
    parents = chained if chain else drawn
    given_parents = None if chain else torch.tensor(parents)
    found = node_counts(torch.tensor(base, dtype=torch.int32), torch.tensor(tokens), given_parents)
    assert found.dtype == torch.int32
    expected = [
        [path_counts(base[b], tokens[b], parents[b], node) for node in range(nodes)]
        for b in range(batch)
    ]
    assert found.tolist() == expected


def test_the_depth_of_a_node_is_the_number_of_drafts_on_the_path_to_it() -> None:
    tokens = torch.tensor([[1, 2, 3, 2, 5], [1, 2, 3, -1, -1]])
    parents = torch.tensor([[-1, 0, 0, 1, 3], [0, 0, 1, -1, -1]])
    tree, chain = node_depths(tokens, parents), node_depths(tokens)
    assert tree[0].tolist() == [0, 1, 1, 2, 3]
    assert tree[1, :3].tolist() == [0, 1, 2]
    assert chain.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_siblings_do_not_see_each_other() -> None:
    tree = torch.tensor([[-1, 0, 0, 1]])
    found = node_counts(torch.tensor([[0, 1, 0, 0]]), torch.tensor([[1, 2, 3, 2]]), tree)
    assert found.tolist() == [[[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 2, 0]]]


@pytest.mark.parametrize("strength", [0.5, 1.0, 1.3, 10.0])
def test_repetition_penalty_is_that_of_transformers(strength: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, VOCAB, generator=generator) * 4
    prompt, response = torch.tensor([[0, 1, 1], [5, 0, 5]]), torch.tensor([[2, 2], [5, 6]])
    processor = RepetitionPenaltyLogitsProcessor(strength)
    expected = processor(torch.cat((prompt, response), dim=1), logits.clone())
    holds = torch.zeros(2, VOCAB, dtype=torch.bool).scatter_(1, prompt, True)
    counts = torch.zeros(2, VOCAB, dtype=torch.int32).scatter_add_(
        1, response, torch.ones(2, 2, dtype=torch.int32)
    )
    strengths = [(strength, 0.0, 0.0)] * 2
    assert torch.equal(
        penalised(logits[:, None], holds, counts[:, None], strengths)[:, 0], expected
    )


def test_all_penalties_and_the_bias_follow_the_written_formula_in_its_order() -> None:
    logits = np.array([2.0, -1.0, 0.5, -3.0, 4.0])
    holds, counts = np.array([1, 1, 0, 0, 0]), np.array([0, 2, 3, 0, 1])
    r, f, p, bias = 1.5, 0.25, -0.75, {4: -2.0, 3: 100.0}
    seen = (holds + counts) > 0
    expected = np.where(seen, np.where(logits > 0, logits / r, logits * r), logits)
    expected = expected - f * counts - p * (counts > 0)
    for token, value in bias.items():
        expected[token] += value
    found = penalised(
        torch.tensor(logits)[None, None],
        torch.tensor(holds, dtype=torch.bool)[None],
        torch.tensor(counts)[None, None],
        [(r, f, p)],
    )[0]
    add_bias_(found, torch.tensor(list(bias)), torch.tensor(list(bias.values())))
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-6)


def test_frequency_and_presence_leave_tokens_of_the_prompt_alone() -> None:
    logits = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(0))
    nothing_said = torch.zeros(1, 1, VOCAB, dtype=torch.int32)
    everything_asked = torch.ones(1, VOCAB, dtype=torch.bool)
    strengths = [(1.0, 2.0, 2.0)]
    assert torch.equal(penalised(logits, everything_asked, nothing_said, strengths), logits)


def test_neutral_values_leave_every_bit() -> None:
    logits = torch.randn(3, 2, VOCAB, generator=torch.Generator().manual_seed(1)) * 30
    counts = torch.full((3, 2, VOCAB), 5, dtype=torch.int32)
    strengths = [(1.0, 0.0, 0.0)] * 3
    assert torch.equal(
        penalised(logits, torch.ones(3, VOCAB, dtype=torch.bool), counts, strengths), logits
    )
