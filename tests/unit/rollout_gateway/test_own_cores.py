"""Cores of engine workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.workers.local import own_cores


@given(
    cores=st.lists(st.integers(0, 63), min_size=1, max_size=16, unique=True).map(sorted),
    places=st.integers(1, 8),
)
def test_workers_have_cores_of_their_own_as_far_as_there_are_enough(
    cores: list[int], places: int
) -> None:
    found = [own_cores(place, places, cores) for place in range(places)]
    wanted = max(1, len(cores) // places)
    assert {len(one) for one in found} == {wanted}
    used = [core for one in found for core in one]
    assert set(used) <= set(cores)
    if places * wanted <= len(cores):
        assert len(set(used)) == places * wanted
    else:
        assert set(used) == set(cores)
