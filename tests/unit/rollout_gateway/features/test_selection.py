"""Which rows of a request make its batch."""

from __future__ import annotations

import numpy as np

from paceline.services.rollout_gateway.engines.worker.ring import RowArray, row_dtype
from paceline.services.rollout_gateway.features import longest_run

TOKENS = [10, 11, 12, 13, 14, 15]


def rows(*positions: int, version: int = 0, tokens: list[int] = TOKENS) -> RowArray:
    made = np.zeros(len(positions), dtype=row_dtype(4))
    made["request_id"] = 1
    made["position"] = positions
    made["token_id"] = [tokens[position] for position in positions]
    made["policy_version"] = version
    return made


def positions_of(some: RowArray) -> list[int]:
    return list(some["position"][longest_run(some, TOKENS)].tolist())


def test_the_last_tokens_row_is_left_out() -> None:
    assert positions_of(rows(0, 1, 2, 3, 4, 5)) == [0, 1, 2, 3, 4]


def test_a_gap_leaves_the_longest_stretch() -> None:
    assert positions_of(rows(0, 1, 3, 4)) in ([0, 1], [3, 4])
    assert positions_of(rows(0, 2, 3, 4)) == [2, 3, 4]


def test_the_newest_row_of_a_position_counts() -> None:
    twice = np.concatenate([rows(0, 1, 2), rows(1, 2, version=5)])
    assert twice["policy_version"][longest_run(twice, TOKENS)].tolist() == [0, 5, 5]


def test_rows_of_other_tokens_are_left_out() -> None:
    other = rows(2, tokens=[0, 0, 99])
    assert positions_of(np.concatenate([rows(0, 1), other])) == [0, 1]
    assert len(longest_run(other, TOKENS)) == 0
