"""Rows of steps: every sequence once a pass, nothing lost, the same after any history."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.drafter_trainer.config import OfflineConfig
from paceline.services.drafter_trainer.offline.data import Example
from paceline.services.drafter_trainer.offline.rank import rows_of, split
from paceline.training import first_fit

CONFIG = OfflineConfig(data=Path("d"), model=Path("m"), row_tokens=50, seed=7)


def sample(length: int, prompt: int = 2) -> Example:
    return Example(np.arange(length), np.arange(length) >= prompt)


@given(st.lists(st.integers(3, 50), min_size=1, max_size=80), st.integers(1, 3))
def test_a_pass_holds_every_sequence_once_and_no_row_too_long(
    lengths: list[int], epochs: int
) -> None:
    rows = list(rows_of([sample(n) for n in lengths], CONFIG, epochs))
    assert sorted(len(one) for row in rows for one in row) == sorted(lengths * epochs)
    assert max(sum(map(len, row)) for row in rows) <= 50


def test_passes_have_orders_of_their_own() -> None:
    samples = [sample(n) for n in range(5, 40)]
    each = len(list(rows_of(samples, CONFIG, 1)))
    first, second = (
        [[len(one) for one in row] for row in islice(rows_of(samples, CONFIG), begin, begin + each)]
        for begin in (0, each)
    )
    assert first != second


def test_rows_are_filled() -> None:
    assert first_fit([30, 30, 20, 20, 10], 50, range(5)) == [[0, 2], [1, 3], [4]]


def test_at_least_one_sequence_is_held_out_and_one_is_not() -> None:
    samples = [sample(n) for n in range(5, 9)]
    for share, held in ((0.0, 0), (0.01, 1), (0.5, 2), (0.99, 3)):
        train, heldout = split(samples, share, 0)
        assert len(heldout) == held
        assert {len(s) for s in train} | {len(s) for s in heldout} == {5, 6, 7, 8}
        assert len(train) + len(heldout) == 4
