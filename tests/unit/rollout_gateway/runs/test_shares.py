"""Where the samples of a call decode."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.runs.tasks import shares


@given(samples=st.integers(1, 600), workers=st.integers(1, 64))
def test_shares_are_equal_and_of_workers_that_there_are(samples: int, workers: int) -> None:
    places = shares(samples, workers)
    counts = Counter(places)
    assert len(places) == samples
    assert set(places) <= set(range(workers))
    assert max(counts.values()) - min(counts[place] for place in range(workers)) <= 1


def test_siblings_lie_together() -> None:
    assert shares(6, 2) == [0, 0, 0, 1, 1, 1]
    assert shares(5, 2) == [0, 0, 0, 1, 1]
    assert shares(2, 4) == [0, 2]


@given(tasks=st.integers(1, 40), size=st.integers(1, 16), workers=st.integers(1, 8))
def test_a_task_is_on_two_workers_only_where_a_share_ends(
    tasks: int, size: int, workers: int
) -> None:
    places = shares(tasks * size, workers)
    split = sum(len({*places[task * size : (task + 1) * size]}) - 1 for task in range(tasks))
    assert split <= workers - 1
