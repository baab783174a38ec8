"""Ranks are dealt to the hosts that have places for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import FailedPrecondition
from paceline.ranks.group import HostShare
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.hosts import dealt, shares

PLACES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("places", "ranks", "held"),
    [
        ((2, 2), 4, [2, 2]),
        ((2, 2), 3, [2, 1]),
        ((2, 2), 2, [1, 1]),
        ((2, 2), 1, [1, 0]),
        ((8, 8), 11, [6, 5]),
        ((1, 4, 2), 6, [1, 3, 2]),
    ],
)
def test_ranks_are_dealt_one_by_one_the_first_host_first(
    places: tuple[int, ...], ranks: int, held: list[int]
) -> None:
    assert dealt(places, ranks) == held


@given(PLACES, st.data())
def test_no_host_has_more_ranks_than_places_or_than_one_that_has_a_place_left(
    places: list[int], data: st.DataObject
) -> None:
    ranks = data.draw(st.integers(1, sum(places)))
    held = dealt(places, ranks)
    assert sum(held) == ranks
    assert all(here <= most for here, most in zip(held, places, strict=True))
    assert all(held) or ranks < len(places)
    least = min((here for here, most in zip(held, places, strict=True) if here < most), default=9)
    assert max(held) <= least + 1
    before = dealt(places, ranks - 1)
    assert sum(here > there for here, there in zip(held, before, strict=True)) == 1


def test_each_host_holds_the_ranks_that_follow_those_of_the_one_before() -> None:
    config = PolicyTrainerConfig(hosts=(2, 1, 4))
    assert shares(config, 5, "cpu") == [
        HostShare(0, 2, 5, "cpu"),
        HostShare(2, 1, 5, "cpu"),
        HostShare(3, 2, 5, "cpu"),
    ]
    assert shares(PolicyTrainerConfig(ranks=2), 7) == [HostShare(0, 7, 7)]


@pytest.mark.parametrize("ranks", [0, 5])
def test_ranks_without_a_place_are_refused(ranks: int) -> None:
    with pytest.raises(FailedPrecondition, match=rf"seen: {ranks} ranks, .*; allowed: 1 to 4"):
        shares(PolicyTrainerConfig(hosts=(2, 2)), ranks)
