"""Which tokens rounds that were off leave unread, and in which readings they are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.engines.sglang.plugin.slot_rows import (
    SlotRows,
    Unread,
    readings,
)

SPANS = st.lists(
    st.integers(1, 60).flatmap(
        lambda length: st.tuples(st.integers(0, length - 1), st.just(length))
    ),
    min_size=1,
    max_size=6,
)


@given(SPANS, st.integers(1, 64))
def test_readings_read_every_token_in_order_and_end_all_rows_together(
    spans: list[tuple[int, int]], tokens: int
) -> None:
    firsts, lengths = [first for first, _ in spans], [length for _, length in spans]
    found = readings(firsts, lengths, tokens)
    for row, (first, length) in enumerate(spans):
        read = [at for one in found for at in range(one.begins[row], one.ends[row])]
        assert sorted(set(read)) == list(range(first, length))
        assert read == sorted(read)
        assert set(read[length - first :]) <= {length - 1}  # only the last token is read again
    for one in found:
        sizes = [end - begin for begin, end in zip(one.begins, one.ends, strict=True)]
        assert min(sizes) >= 1
        assert sum(sizes) <= max(tokens, len(spans))
    assert found[-1].ends == lengths


@given(SPANS)
def test_a_readings_entries_are_those_of_its_rows_one_after_the_other(
    spans: list[tuple[int, int]],
) -> None:
    firsts, lengths = [first for first, _ in spans], [length for _, length in spans]
    table = torch.arange(len(spans) * max(lengths)).view(len(spans), -1)
    [whole] = readings(firsts, lengths, 10_000)
    expected = [int(table[row, at]) for row, span in enumerate(spans) for at in range(*span)]
    assert whole.of(table).tolist() == expected


def rows_of(slots: list[int], stored: SlotRows, *, unread: bool) -> None:
    index = torch.tensor(slots)
    stored.put(index, index, index, 1, torch.zeros(len(slots), 2), unread=unread)


def test_the_first_unread_token_is_found_by_its_slot_whatever_lies_behind_the_row() -> None:
    stored = SlotRows(20, 2, torch.float32, torch.device("cpu"))
    rows_of(list(range(20)), stored, unread=False)
    rows_of([3, 5, 9, 12], stored, unread=True)
    slots = torch.tensor([[0, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]])
    lengths = torch.tensor([4, 3, 4])
    assert stored.first_unread(slots, lengths) == [1, 3, 2]  # slot 9 is not the second row's
    stored.mark_read(torch.tensor([3]))
    assert stored.first_unread(slots, lengths) == [3, 3, 2]
    rows_of([5], stored, unread=False)  # the slot has another token now
    assert stored.first_unread(slots, lengths) == [4, 3, 2]


def prefill(*prefixes: int) -> Any:
    return SimpleNamespace(reqs=[SimpleNamespace() for _ in prefixes], prefix_lens=list(prefixes))


@pytest.mark.parametrize("left", [False, True])
def test_a_prefix_out_of_the_cache_is_looked_at_once_a_round_was_off(left: bool) -> None:
    unread, batch = Unread(), prefill(0, 5)
    if left:
        unread.leave(SimpleNamespace(reqs=[], spec_info=None))
    unread.prefilled(batch)
    assert unread.caught_up(batch.reqs[:1])
    assert unread.caught_up(batch.reqs) is not left
    assert unread.caught_up(batch.reqs)
