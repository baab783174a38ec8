"""Rows of steps: every sequence once a pass, nothing lost, the same whatever happened before."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.drafter_trainer.offline.data import Example
from paceline.services.drafter_trainer.offline.plan import (
    epoch_rows,
    place,
    split,
    steps_from,
    steps_of,
)
from paceline.training.packing import first_fit


def sample(length: int, prompt: int = 2) -> Example:
    return Example(np.arange(length), np.arange(length) >= prompt)


@given(st.lists(st.integers(3, 50), min_size=1, max_size=80), st.integers(0, 5))
def test_a_pass_holds_every_sequence_once_and_no_row_too_long(
    lengths: list[int], epoch: int
) -> None:
    rows = epoch_rows(lengths, 50, 7, epoch)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 50


def test_rows_are_filled() -> None:
    assert first_fit([30, 30, 20, 20, 10], 50, range(5)) == [[0, 2], [1, 3], [4]]


def test_a_run_that_resumes_reads_on_where_it_stopped() -> None:
    samples = [sample(n) for n in range(5, 40)]
    whole = list(islice(steps_from(samples, 60, 16, 3, rows_per_step=4, first=0), 20))
    assert whole[13:] == list(islice(steps_from(samples, 60, 16, 3, rows_per_step=4, first=13), 7))
    rows = sum(len(epoch_rows([len(s) for s in samples], 60, 3, epoch)) for epoch in range(2))
    assert steps_of([len(s) for s in samples], 60, 3, epochs=2, rows_per_step=4) == -(-rows // 4)


@given(st.integers(3, 60), st.integers(2, 58), st.integers(8, 20), st.integers(0, 99))
def test_a_window_lies_inside_its_sequence_and_holds_a_target(
    length: int, prompt: int, window: int, seed: int
) -> None:
    one = sample(length, min(prompt, length - 1))
    document = place(one, window, np.random.default_rng(seed))
    assert document.start >= 0
    assert document.start + document.length <= length - 2
    assert document.length == min(window, length - 2)
    assert document.targets >= 1


def test_windows_of_a_long_sequence_come_from_all_over_it() -> None:
    random = np.random.default_rng(0)
    starts = [place(sample(400), 20, random).start for _ in range(300)]
    counts, _ = np.histogram(starts, bins=4, range=(0, 378))
    assert counts.min() > 40


def test_at_least_one_sequence_is_held_out_and_one_is_not() -> None:
    samples = [sample(n) for n in range(5, 9)]
    for share, held in ((0.0, 0), (0.01, 1), (0.5, 2), (0.99, 3)):
        train, heldout = split(samples, share, 0)
        assert len(heldout) == held
        assert {len(s) for s in train} | {len(s) for s in heldout} == {5, 6, 7, 8}
        assert len(train) + len(heldout) == 4
