"""The tokens that a packed position sees, and its place some tokens later."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculators.packed import PackedRow, _edges, packed_attention


def row(lengths: list[int]) -> PackedRow:
    """Documents with the given lengths."""
    count = sum(lengths)
    zeros = torch.zeros(count, dtype=torch.int64)
    return PackedRow(
        states=torch.zeros(count, 2),
        next_states=torch.zeros(count, 2),
        next_tokens=zeros,
        draft_tokens=zeros,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        documents=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        valid=torch.ones(count, dtype=torch.bool),
        lm_head_hash="0" * 16,
    )


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(LENGTHS)
def test_a_position_sees_itself_and_the_positions_before_it_in_its_document(
    lengths: list[int],
) -> None:
    blocks = [torch.ones(n, n, dtype=torch.bool).tril() for n in lengths]
    assert torch.equal(row(lengths).mask(), torch.block_diag(*blocks))


@given(LENGTHS, st.integers(0, 6))
def test_steps_ahead_stay_inside_the_document(lengths: list[int], steps: int) -> None:
    there, inside = row(lengths).ahead(steps)
    ends = torch.tensor(lengths).cumsum(0).repeat_interleave(torch.tensor(lengths)).tolist()
    for here, end in enumerate(ends):
        assert bool(inside[here]) == (here + steps < end)
        assert int(there[here]) == (here + steps if here + steps < end else here)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(1, 2))
def test_attention_in_blocks_is_attention_over_the_whole_row(
    lengths: list[int], batch: int
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    count = sum(lengths)
    mask = row(lengths).mask().expand(batch, 1, -1, -1)
    queries, keys, values = (
        torch.randn(batch, heads, count, 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    scores = (queries @ keys.repeat_interleave(2, dim=1).mT / 8**0.5).masked_fill(
        ~mask, float("-inf")
    )
    expected = scores.softmax(-1) @ values.repeat_interleave(2, dim=1)
    torch.testing.assert_close(packed_attention(queries, keys, values, mask), expected)


def test_blocks_end_where_documents_end_and_are_not_small() -> None:
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in (60, 10, 10, 100, 5))).bool()
    assert _edges(mask) == [0, 70, 180, 185]
    mask[184, 0] = True  # one look back joins them all
    assert _edges(mask) == [0, 185]
