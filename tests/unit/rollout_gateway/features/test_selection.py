"""Which rows of a request make its batch, and which rejected drafts stay with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.engines.worker.ring import RowArray, row_dtype
from paceline.services.rollout_gateway.features.selection import hanging_drafts, longest_run

TOKENS = [10, 11, 12, 13, 14, 15]


def rows(*positions: int, version: int = 0, tokens: list[int] = TOKENS) -> RowArray:
    made = np.zeros(len(positions), dtype=row_dtype(4))
    made["request_id"] = 1
    made["position"] = positions
    made["token_id"] = [tokens[position] for position in positions]
    made["policy_version"] = version
    return made


def drafts(*placed: tuple[int, int]) -> RowArray:
    """Rejected drafts as (position, stamp)."""
    made = np.zeros(len(placed), dtype=row_dtype(4))
    made["request_id"] = 1
    made["position"] = [position for position, _ in placed]
    made["parent"] = [stamp for _, stamp in placed]
    made["token_id"] = 90 + np.arange(len(placed))
    return made


def positions_of(some: RowArray) -> list[int]:
    return list(some["position"][longest_run(some, TOKENS)].tolist())


def hung(some: RowArray) -> tuple[list[int], list[int]]:
    """Tokens of the drafts that stay, and their parents."""
    found, parents = hanging_drafts(some, longest_run(some, TOKENS))
    return some["token_id"][found].tolist(), parents.tolist()


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


def test_a_rejected_draft_is_never_a_row_of_the_sequence() -> None:
    like_the_token = drafts((2, 1))
    like_the_token["token_id"] = TOKENS[2]
    assert positions_of(np.concatenate([rows(0, 1), like_the_token])) == [0, 1]


def test_chains_and_siblings_name_their_parents_in_the_batch() -> None:
    first_round = [rows(0, 1), drafts((2, 1), (3, 2), (4, 2))]  # a chain of three under position 1
    second_round = [
        rows(2, 3),
        drafts((3, 1), (4, 1), (4, 3)),
    ]  # a sibling of token 3, one of token 4, a child of the first
    made = np.concatenate([*first_round, *second_round])
    made["token_id"][made["parent"] > 0] = [91, 92, 93, 94, 95, 96]
    assert hung(made) == ([91, 92, 93, 94, 95, 96], [1, 4, 5, 2, 3, 7])


def test_a_draft_whose_parent_is_gone_falls_with_its_children() -> None:
    whole = np.concatenate([rows(0, 1), drafts((2, 1), (3, 2), (4, 2), (2, 1))])
    whole["token_id"][2:] = [91, 92, 93, 94]
    without = np.delete(whole, 2)  # 92 now points at the sequence's row, which is no draft
    assert hung(without) == ([94], [1])
    assert hung(whole[2:]) == ([], [])  # nothing of the sequence was kept


def test_a_row_of_the_sequence_never_stands_in_for_a_lost_draft_of_its_position() -> None:
    whole = np.concatenate(
        [rows(0, 1, 2), drafts((2, 1), (3, 2))]
    )  # a sibling of token 2 and its child
    assert hung(whole) == ([90, 91], [1, 3])
    assert hung(np.delete(whole, 3)) == ([], [])


def test_drafts_under_a_row_that_was_computed_anew_fall() -> None:
    made = np.concatenate([rows(0, 1), drafts((2, 1)), rows(1, version=3)])
    assert hung(made) == ([], [])


def test_a_draft_in_the_place_of_the_last_token_stays() -> None:
    made = np.concatenate([rows(3, 4), drafts((5, 1))])
    assert hung(made) == ([90], [1])


@given(
    stamps=st.lists(st.one_of(st.integers(0, 4), st.just(2**32 - 1)), max_size=12),
    places=st.lists(st.integers(0, 5), min_size=12, max_size=12),
)
def test_whatever_the_stamps_say_every_kept_draft_stands_behind_its_parent(
    stamps: list[int], places: list[int]
) -> None:
    made = rows(*places[: len(stamps)])
    made["parent"] = stamps
    path = longest_run(made, TOKENS)
    found, parents = hanging_drafts(made, path)
    order = np.concatenate((path, found))
    for place, (index, parent) in enumerate(zip(found, parents, strict=True)):
        assert 0 <= parent < len(path) + place
        assert made["position"][order[parent]] + 1 == made["position"][index]
        assert (made["parent"][index] == 1) == (made["parent"][order[parent]] == 0)
        assert made["parent"][index] > 0


@pytest.mark.parametrize("stamp", [1, 2, 2**32 - 1])
def test_a_draft_before_every_row_has_no_parent(stamp: int) -> None:
    assert hung(np.concatenate([drafts((1, stamp)), rows(0, 1)])) == ([], [])
