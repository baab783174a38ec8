"""Nodes of a round, the budget that picks them, and the forward over chains, trees and rows of
unequal size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import load_model, save_random

from paceline.models import sampling
from paceline.models.cache import StaticCache
from paceline.models.decoder import forward_hidden, head_logits, make_block
from paceline.services.rollout_gateway.engines.embedded.budget import (
    PROBE_EVERY,
    Budget,
    Calibration,
    ForwardCost,
    row_drafts,
)
from paceline.services.rollout_gateway.engines.embedded.verify import (
    Nodes,
    ancestors,
    arrange,
    merge_drafts,
)
from paceline.speculators.base import Drafts

trees = st.integers(1, 12).flatmap(
    lambda count: st.tuples(*(st.integers(0, node) for node in range(count))).map(list)
)
"""Parents of the drafts of one row: node i + 1 under a node of smaller index."""


def climb(parents: list[int], node: int) -> list[int]:
    """Nodes above a node, itself first, the root last."""
    seen = [node]
    while node:
        node = parents[node]
        seen.append(node)
    return seen


@given(
    st.lists(trees, min_size=1, max_size=3).filter(
        lambda rows: len({len(row) for row in rows}) == 1
    )
)
def test_depths_and_ancestors_are_those_of_climbing_to_the_root(rows: list[list[int]]) -> None:
    parents = [[0, *row] for row in rows]
    depths, seen = (
        sampling.node_depths(torch.tensor(parents), torch.tensor(parents)),
        ancestors(torch.tensor(parents), len(rows[0])),
    )
    for row, above in enumerate(parents):
        for node in range(len(above)):
            path = climb(above, node)
            assert int(depths[row, node]) == len(path) - 1
            assert set(seen[row, node].nonzero()[:, 0].tolist()) == set(path)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_node_sees_its_path_and_nothing_else(family: str, tmp_path: Path) -> None:
    """Oracle: transformers over the prompt and each path alone.

    Rows differ in size, so some nodes are left out.
    """
    model = save_random(tmp_path, family)
    weights = load_model(tmp_path, dtype=torch.float32)
    cache = StaticCache(
        weights.config,
        layers=3,
        slots=3,
        capacity=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    torch.manual_seed(1)
    prompts = [torch.randint(3, 97, (n,)) for n in (9, 5, 14)]
    parents = [[0, 0, 1, 1, 2, 3], [0, 1, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    counts = [6, 3, 2]
    tokens = torch.randint(3, 97, (3, 6))
    for row, count in enumerate(counts):
        tokens[row, count:] = -1
    with torch.inference_mode():
        for row, prompt in enumerate(prompts):
            known = len(prompt) - 1
            block = make_block(
                weights.config,
                weights.rotation,
                cache,
                slice(row, row + 1),
                torch.arange(known)[None],
                known,
            )
            forward_hidden(weights, cache, prompt[None, :-1], block)
        roots = torch.tensor([len(prompt) - 1 for prompt in prompts])
        last = torch.stack([prompt[-1:] for prompt in prompts])
        nodes = arrange(last, Drafts(tokens, torch.ones(3, 6), torch.tensor(parents)))
        assert nodes.kept is not None
        length = int(roots.max()) + nodes.width
        positions = nodes.positions(roots)
        block = make_block(
            weights.config,
            weights.rotation,
            cache,
            slice(0, 3),
            positions,
            length,
            nodes.layout(roots, length),
        )
        ids = nodes.compute(nodes.tokens)
        assert len(ids) == 3 + sum(counts)
        logits = nodes.spread(head_logits(weights, forward_hidden(weights, cache, ids, block)))
        for row, prompt in enumerate(prompts):
            for node in range(counts[row] + 1):
                path = [
                    int(tokens[row, at - 1])
                    for at in reversed(climb([0, *parents[row]], node))
                    if at
                ]
                expected = model(
                    torch.cat((prompt, torch.tensor(path, dtype=torch.int64)))[None]
                ).logits[0, -1]
                torch.testing.assert_close(logits[row, node], expected, atol=2e-5, rtol=0)


def test_drafts_of_some_rows_become_drafts_of_all() -> None:
    chain = Drafts(torch.tensor([[7, 8, 9]]), torch.tensor([[0.9, 0.8, 0.7]]))
    tree = Drafts(torch.tensor([[4, 5]]), torch.tensor([[0.5, 0.4]]), torch.tensor([[0, 0]]))
    both = merge_drafts(3, [([2], chain), ([0], tree)])
    assert both is not None
    assert both.parents is not None
    assert both.tokens.tolist() == [[4, 5, -1], [-1, -1, -1], [7, 8, 9]]
    assert both.parents[0, :2].tolist() == [0, 0]
    assert both.parents[2].tolist() == [0, 1, 2]
    assert merge_drafts(2, []) is None


def test_a_chain_stays_a_chain_and_a_full_block_is_forwarded_whole() -> None:
    nodes = arrange(torch.tensor([[3]]), Drafts(torch.tensor([[5, 6]]), torch.ones(1, 2)))
    assert (nodes.parents, nodes.kept, nodes.width) == (None, None, 3)
    assert nodes.positions(torch.tensor([10])).tolist() == [[10, 11, 12]]
    assert Nodes(torch.tensor([[3, -1], [4, 5]])).drafted.tolist() == [0, 1]


# ---- the budget


def measured(costs: dict[int, float]) -> Budget:
    budget = Budget()
    for tokens, seconds in costs.items():
        budget.cost.learn(tokens, seconds)
    return budget


def best_count(chances: list[float], rows: int, fixed: float, per_token: float) -> int:
    """Return the best number of the likeliest nodes by trying every number."""
    ordered = sorted(chances, reverse=True)
    rates = [
        (rows + sum(ordered[:k])) / (fixed + per_token * (rows + k))
        for k in range(len(ordered) + 1)
    ]
    return int(np.argmax(rates))


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.sampled_from([0.01, 0.15, 0.45, 0.75, 0.97]), min_size=4, max_size=4),
        min_size=1,
        max_size=5,
    ),
    st.floats(0.0005, 0.05),
)
def test_the_nodes_verified_are_those_of_the_best_rate(
    shares: list[list[float]], per_token: float
) -> None:
    fixed, rows = 0.01, len(shares)
    budget = measured({1: fixed + per_token, 100: fixed + 100 * per_token})
    scores = torch.tensor(shares).cumprod(dim=1)
    tokens = torch.arange(rows * 4).view(rows, 4)
    pruned = budget.prune(Drafts(tokens, scores), "eagle", "eagle:4_1_5")
    # A fresh calibration believes the middle of each bin.
    centers = {0.01: 0.01, 0.15: 0.15, 0.45: 0.45, 0.75: 0.75, 0.97: 0.965}
    chances = np.array([[centers[one] for one in row] for row in shares]).cumprod(axis=1)
    count = best_count(chances.ravel().tolist(), rows, fixed, per_token)
    assert int((pruned.tokens >= 0).sum()) == count
    for row in range(rows):
        own = [token for token in pruned.tokens[row].tolist() if token >= 0]
        assert own == tokens[row, : len(own)].tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.15, 0.45, 0.75, 0.97]), min_size=3, max_size=3),
        min_size=1,
        max_size=3,
    ),
    st.floats(0.0005, 0.05),
)
def test_the_drafts_of_the_best_rate_are_verified(
    rows: list[list[float]], per_token: float
) -> None:
    """Against every number of drafts of every row."""
    fixed = 0.01
    budget = measured({1: fixed + per_token, 100: fixed + 100 * per_token})
    scores = torch.tensor(rows).cumprod(dim=1)
    tokens = torch.arange(scores.numel()).view(scores.shape)
    pruned = budget.prune(Drafts(tokens, scores), "eagle", "eagle:3_1_4")
    centers = {0.15: 0.15, 0.45: 0.45, 0.75: 0.75, 0.97: 0.965}
    chances = [np.cumprod([centers[one] for one in shares]) for shares in rows]

    def rate(counts: Sequence[int]) -> float:
        gain = sum(1 + chance[:count].sum() for chance, count in zip(chances, counts, strict=True))
        return float(gain / (fixed + per_token * (len(rows) + sum(counts))))

    best = max(rate(counts) for counts in product(range(4), repeat=len(rows)))
    assert rate((pruned.tokens >= 0).sum(dim=1).tolist()) == pytest.approx(best)


def test_a_pruned_tree_keeps_parents_of_what_it_keeps() -> None:
    budget = measured({1: 0.011, 100: 0.110})
    scores = torch.tensor([[0.9, 0.06, 0.8, 0.05, 0.7]])
    parents = torch.tensor([[0, 0, 1, 2, 3]])
    pruned = budget.prune(
        Drafts(torch.tensor([[10, 11, 12, 13, 14]]), scores, parents), "eagle", "eagle:3_2_6"
    )
    assert pruned.parents is not None
    assert pruned.tokens.tolist() == [[10, 12, 14]]
    assert pruned.parents.tolist() == [[0, 1, 2]]


def test_everything_is_verified_while_costs_are_unknown_and_nothing_when_nothing_pays() -> None:
    drafts = Drafts(torch.tensor([[1, 2]]), torch.tensor([[0.04, 0.01]]))
    assert Budget().prune(drafts, "eagle", "a") is drafts
    assert measured({1: 1.0, 2: 2.0, 3: 3.0}).prune(drafts, "eagle", "a").tokens.shape == (1, 0)


def test_drafts_that_seemed_worthless_are_tried_again_and_a_new_drafter_at_once() -> None:
    budget = measured({1: 0.011, 100: 0.110})
    drafts = Drafts(torch.tensor([[5, 6]]), torch.tensor([[0.9, 0.9 * 0.9]]))
    for _ in range(300):
        budget.learn("eagle", zip(row_drafts(drafts), [{0}], strict=True))
    kept = [
        budget.prune(drafts, "eagle", "eagle:2_1_3").tokens.shape[1] for _ in range(2 * PROBE_EVERY)
    ]
    assert (kept.count(2), kept.count(0)) == (2, 2 * PROBE_EVERY - 2)
    budget.forget("eagle")
    assert budget.prune(drafts, "eagle", "eagle:2_1_3").tokens.tolist() == [[5, 6]]


def test_a_drafter_drafts_without_a_floor_in_just_the_rounds_that_verify_everything() -> None:
    """A floor in such a round would hide the deep nodes that the round must look at."""
    budget, arm = measured({1: 0.011, 100: 0.110}), "eagle:2_1_3"
    drafts = Drafts(torch.tensor([[5, 6]]), torch.tensor([[0.85, 0.85 * 0.03]]))
    rounds = [
        (budget.floor(arm) > 0.0, budget.prune(drafts, "eagle", arm).tokens.shape[1])
        for _ in range(3 * PROBE_EVERY)
    ]
    assert rounds[0] == (False, 1)  # no round has shown a threshold yet
    assert set(rounds[1:]) == {(True, 1), (False, 2)}
    assert rounds.count((False, 2)) == 3


def test_calibration_follows_what_is_drawn() -> None:
    calibration = Calibration()
    generator = random.Random(0)
    for _ in range(2000):
        calibration.learn(generator.uniform(0.8, 0.9), generator.random() < 0.3)
    assert calibration.chance(0.85) == pytest.approx(0.3, abs=0.03)
    assert calibration.chance(0.15) == pytest.approx(0.15)
    for _ in range(8000):
        calibration.learn(0.85, drawn=True)
    assert calibration.chance(0.85) > 0.8


def test_only_drafts_whose_parents_were_drawn_teach() -> None:
    budget = measured({1: 0.011, 100: 0.110})
    drafts = Drafts(
        torch.tensor([[5, 6, 7]]),
        torch.tensor([[0.85, 0.45 * 0.85, 0.35]]),
        torch.tensor([[0, 1, 0]]),
    )
    for _ in range(200):
        # the root, then its second child
        budget.learn("eagle", zip(row_drafts(drafts), [{0, 3}], strict=True))
    # Node 0 is never drawn, node 2 always; node 1 is a child of node 0, so it has no data.
    assert [budget._calibrations["eagle"].chance(share) < 0.05 for share in (0.85, 0.45)] == [
        True,
        False,
    ]
    assert budget._calibrations["eagle"].chance(0.35) > 0.95


def test_costs_are_interpolated_and_an_outlier_moves_little() -> None:
    cost = ForwardCost()
    assert not cost.known
    cost.learn(8, 0.008)
    cost.learn(48, 0.024)
    seconds = cost.seconds(8, 88)
    assert [seconds[tokens - 8] for tokens in (8, 28, 48, 96)] == pytest.approx(
        [0.008, 0.016, 0.024, 0.048]
    )
    cost.learn(48, 2.4)
    assert cost.seconds(48, 0) == pytest.approx([0.024 * 1.2])
