"""What a position of a packed row sees and where it is some tokens on, against walks along its
parents.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculators.packed import PackedRow, _edges, ancestor_mask, packed_attention


@st.composite
def forests(draw: st.DrawFn) -> list[int]:
    """Parents before their children; long runs are as likely as short ones."""
    parents = [-1] * draw(st.integers(0, 1))
    for here in range(len(parents), draw(st.integers(0, 24))):
        parents.append(draw(st.one_of(st.just(here - 1), st.integers(-1, here - 1))))
    return parents


def path(parents: list[int], here: int) -> list[int]:
    """A position and its ancestors, root last."""
    return [] if here < 0 else [here, *path(parents, parents[here])]


def row(parents: list[int], next_tokens: list[int], draft_tokens: list[int]) -> PackedRow:
    count = len(parents)
    return PackedRow(
        states=torch.zeros(count, 2),
        next_states=torch.zeros(count, 2),
        next_tokens=torch.tensor(next_tokens, dtype=torch.int64),
        draft_tokens=torch.tensor(draft_tokens, dtype=torch.int64),
        positions=torch.tensor(
            [len(path(parents, here)) - 1 for here in range(count)], dtype=torch.int64
        ),
        parents=torch.tensor(parents, dtype=torch.int64),
        documents=torch.tensor(
            [path(parents, here)[-1] for here in range(count)], dtype=torch.int64
        ),
        valid=torch.ones(count, dtype=torch.bool),
        lm_head_hash="0" * 16,
    )


@given(forests())
def test_a_position_sees_itself_and_its_ancestors_and_nothing_else(parents: list[int]) -> None:
    expected = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for here in range(len(parents)):
        expected[here, path(parents, here)] = True
    assert torch.equal(ancestor_mask(torch.tensor(parents, dtype=torch.int64)), expected)


@given(forests(), st.integers(0, 6), st.data())
def test_steps_ahead_walk_along_drawn_tokens_and_down_branches(
    parents: list[int], steps: int, data: st.DataObject
) -> None:
    count = len(parents)
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    drafts = data.draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count))
    there, inside = row(parents, tokens, drafts).ahead(steps)
    for here in range(count):
        now, left = here, steps
        while (
            left
            and now + 1 < count
            and parents[now + 1] == now
            and drafts[now] in (-1, tokens[now + 1])
        ):
            now, left = now + 1, left - 1
        assert bool(inside[here]) == (left == 0)
        assert int(there[here]) == (here if left else now)


def test_the_last_position_does_not_lead_into_a_rejected_draft_beside_its_successor() -> None:
    # Positions 0, 1 are the sequence; 2 is a draft that was rejected where token 5 was drawn, 3
    # another one under it.
    one = row([-1, 0, 1, 2], next_tokens=[3, 4, 7, 8], draft_tokens=[4, 5, -1, -1])
    assert one.ahead(1)[1].tolist() == [True, False, True, False]
    assert one.ahead(2)[1].tolist() == [False] * 4


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(0, 30), st.integers(1, 2))
def test_attention_in_blocks_is_attention_over_the_whole_row(
    lengths: list[int], branches: int, batch: int
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths) + branches)
    parents = list[int]()
    for length in lengths:
        first = len(parents)
        parents += [-1, *range(first, first + length - 1)]
        for _ in range(branches // len(lengths)):
            parents.append(int(torch.randint(first - 1, len(parents), (), generator=generator)))
            parents[-1] = -1 if parents[-1] < first else parents[-1]
    mask = ancestor_mask(torch.tensor(parents)).expand(batch, 1, -1, -1)
    queries, keys, values = (
        torch.randn(batch, heads, len(parents), 8, generator=generator, dtype=torch.float64)
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
