"""A row is a list that shares its unchanged elements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.coordinator.machine.slots import BLOCK, Row

VALUES = st.integers(0, 3)


def row(values: list[int]) -> Row[int]:
    return Row(values, lambda value: value % 2)


@given(st.lists(VALUES, min_size=1, max_size=3 * BLOCK), st.data())
def test_a_changed_row_is_the_changed_list(values: list[int], data: st.DataObject) -> None:
    places = st.integers(0, len(values) - 1)
    changes = data.draw(st.dictionaries(places, VALUES, max_size=5))
    expected = [changes.get(place, value) for place, value in enumerate(values)]
    old = row(values)
    new = old.replaced(changes)
    assert (list(old), list(new), len(new)) == (values, expected, len(values))
    assert new == row(expected)
    assert hash(new) == hash(row(expected))
    assert [new[place] for place in range(len(new))] == expected
    assert list(new.changed_since(old)) == [
        place for place, value in enumerate(values) if expected[place] != value
    ]
    for kind in (0, 1):
        where = [place for place, value in enumerate(expected) if value % 2 == kind]
        assert (list(new.where(kind)), new.counted(kind)) == (where, len(where))


def test_values_that_an_older_row_lacks_are_changes_and_places_beyond_a_row_are_refused() -> None:
    assert list(row([1, 2]).changed_since(row([]))) == [0, 1]
    with pytest.raises(IndexError):
        row([1, 2]).replaced({BLOCK: 0})
