"""Batches packed before a lease begins, and the largest length of a row."""

from __future__ import annotations

import numpy as np
import pytest
from unit.drafter_trainer.samples import HASH, HIDDEN, PROMPT, VOCABULARY, sample, toy_policy

from paceline.services.drafter_trainer.config import BufferConfig
from paceline.services.drafter_trainer.rows.store import READY, PackedBatch, RowStore

LENGTH, COUNT = 24, 40
POSITION_BYTES = 4 * (2 * HIDDEN + 2 * VOCABULARY)
"""Input state and target state, logits and their gradients, in float32."""


def store(ranks: int = 1, tokens: int = 64, *, batch_bytes: int = 1 << 20) -> RowStore:
    made = RowStore(BufferConfig(), 0, batch_bytes=batch_bytes)
    made.shape = lambda: (ranks, tokens)
    made.add_head(toy_policy().policy_head())
    return made


def fill(rows: RowStore, head: str = HASH) -> None:
    rows.add([sample(LENGTH, seed, session=f"s{seed}", head=head) for seed in range(COUNT)])


def taken(rows: RowStore) -> PackedBatch:
    batch = rows.next()
    assert batch is not None
    return batch


def test_a_lease_begins_with_batches_of_the_rows_that_came_before_it() -> None:
    rows = store()
    fill(rows)
    before = list(rows._ready)
    assert len(before) == READY
    rows.begin()
    assert all(taken(rows) is one for one in before)
    assert all(taken(rows) is not one for one in before), "then they are drawn one by one"


def test_while_somebody_trains_nothing_is_packed_ahead() -> None:
    rows = store()
    rows.begin()
    fill(rows)
    assert not rows._ready
    rows.end()
    assert len(rows._ready) == READY


@pytest.mark.parametrize("ranks", [2, 3])
def test_batches_for_other_ranks_than_there_are_now_are_packed_anew(ranks: int) -> None:
    rows = store()
    fill(rows)
    rows.shape = lambda: (ranks, 64)
    assert len(taken(rows).rows) == ranks


def test_batches_of_a_head_that_is_not_kept_any_more_are_not_trained_on() -> None:
    rows = store()
    fill(rows)
    for version in range(1, 10):
        rows.add_head(toy_policy().policy_head(f"{version:016x}", version))
    assert HASH not in rows.heads
    assert rows.next() is None


@pytest.mark.parametrize("tokens", [64, 200, 400])
def test_a_row_has_about_as_many_tokens_as_are_asked_for(tokens: int) -> None:
    rows = store(tokens=tokens)
    fill(rows)
    (row,) = taken(rows).rows
    assert tokens - LENGTH < int(np.count_nonzero(row.valid)) + PROMPT <= tokens + LENGTH


@pytest.mark.parametrize("positions", [50, 150])
def test_a_row_has_no_more_bytes_of_states_than_a_batch_may(positions: int) -> None:
    rows = store(tokens=10_000, batch_bytes=positions * POSITION_BYTES)
    fill(rows)
    assert positions - LENGTH < taken(rows).samples * (LENGTH - 2) <= positions


def test_a_dropped_row_is_counted_by_its_reason() -> None:
    rows = store()
    rows.add([sample(LENGTH, 1, head="ab" * 8)])  # a head that nobody keeps
    with rows.locked() as buffer:
        assert buffer.dropped == {"stale_head": 1}
