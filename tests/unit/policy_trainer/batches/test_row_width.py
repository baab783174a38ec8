"""Rows are as wide as promises the shortest step."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from unit.policy_trainer.batches.test_packing import SIZES

from paceline.services.policy_trainer.batches.packing import (
    ROW_TOKENS,
    Packing,
    Unit,
    cheapest,
    cost,
    neighbours,
    plan_micro_batches,
    prefix_units,
    widths,
)
from paceline.services.policy_trainer.learn.model import MASKED, PolicyModel, ValueModel, pair_cost

FREE = 0.0
DEAR = 1.0
"""Attention to one token costs as much as all products of one."""


def group(samples: int, shared: int, own: int) -> list[np.ndarray]:
    """Return samples with a shared beginning."""
    return [
        np.array([*range(shared), *([1000 + number] * own)], np.int64) for number in range(samples)
    ]


def chosen(sequences: list[np.ndarray], pair: float, ranks: int = 1, budget: int = 4096) -> int:
    """Tokens of the widest row."""
    alike = neighbours(sequences, [0] * len(sequences))

    def laid_out(row_tokens: int) -> Packing:
        units = prefix_units(alike, row_tokens)
        return Packing(
            units,
            plan_micro_batches(
                [one.tokens for one in units],
                world_size=ranks,
                row_tokens=row_tokens,
                tokens_per_micro_batch=budget,
            ),
        )

    found = cheapest(map(laid_out, widths(budget)), pair)
    rows = [row for rounds in found.plan for micro in rounds for row in micro]
    return max(sum(found.units[unit].tokens for unit in row) for row in rows)


def test_answers_that_are_much_alike_share_one_row_and_others_lie_in_narrow_ones() -> None:
    alike = group(16, shared=200, own=10)
    assert chosen(alike, 1 / 300) == 200 + 16 * 10
    apart = group(16, shared=2, own=40)
    assert chosen(apart, 1 / 300) <= 64 + 2


def test_where_attention_costs_nothing_a_whole_group_is_one_row_and_where_it_is_dear_none_is() -> (
    None
):
    some = group(8, shared=30, own=30)
    assert chosen(some, FREE) == 30 + 8 * 30
    assert chosen(some, DEAR) == 60


def test_no_row_is_wider_than_a_micro_batch_unless_a_trajectory_is() -> None:
    assert chosen(group(16, shared=200, own=40), FREE, budget=512) <= 512
    assert chosen(group(2, shared=10, own=900), FREE, budget=512) == 910
    assert list(widths(1)) == [ROW_TOKENS[0]]


def test_two_ranks_share_a_group_where_one_row_would_leave_one_of_them_idle() -> None:
    some = group(16, shared=40, own=40)
    assert chosen(some, FREE, ranks=1) == 40 + 16 * 40
    assert chosen(some, FREE, ranks=2) < 40 + 16 * 40


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=6),
    st.floats(0, 1),
)
@settings(max_examples=case_count(100), deadline=None)
def test_the_cost_is_that_of_all_cells_and_their_pairs(
    tokens: list[list[int]], pair: float
) -> None:
    units = [Unit((number,), one) for number, one in enumerate(chain(*tokens))]
    numbers = iter(range(len(units)))
    rows = [[next(numbers) for _ in row] for row in tokens]
    width = max(map(sum, tokens))
    wanted = sum(1 + pair for _ in rows for _ in range(width) for _ in range(width)) - sum(
        1.0 for _ in rows for _ in range(width) for _ in range(width - 1)
    )
    assert cost(Packing(units, [[rows, []], []]), pair) == pytest.approx(wanted)


def test_a_pair_costs_what_its_multiplications_do() -> None:
    lm = LlamaForCausalLM(LlamaConfig(**SIZES))
    layer = sum(one.numel() for one in lm.model.layers[0].parameters())
    width = SIZES["num_attention_heads"] * (SIZES["hidden_size"] // SIZES["num_attention_heads"])
    # scores and weighted sum: two multiplications a number of a head; products: one a weight
    wanted = MASKED * 2 * width / layer
    assert pair_cost(PolicyModel(lm)) == pytest.approx(wanted)
    assert pair_cost(ValueModel(lm.model)) == pytest.approx(wanted)
