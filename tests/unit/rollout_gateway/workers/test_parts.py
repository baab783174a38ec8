"""What goes to a worker on another host arrives whole."""

from __future__ import annotations

import pytest

from paceline.errors import ResourceExhausted
from paceline.services.rollout_gateway.workers.parts import PART_BYTES, JoinedParts, parts


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_parts_are_put_together_as_they_were_cut(size: int) -> None:
    joined = JoinedParts()
    for byte in (b"a", b"b"):
        *before, last = [joined.add(part) for part in parts(7, byte * size)]
        assert before == [None] * len(before)
        assert last == byte * size


def test_no_part_is_larger_than_a_stream_takes() -> None:
    found = list(parts(7, b"x" * (2 * PART_BYTES + 5)))
    assert [len(part.data) for part in found] == [PART_BYTES, PART_BYTES, 5]
    assert {part.life for part in found} == {7}


def test_parts_that_come_to_more_than_is_held_are_refused() -> None:
    joined = JoinedParts(2 * PART_BYTES)
    first, second, third = parts(7, b"x" * (2 * PART_BYTES + 1))
    assert joined.add(first) is None
    assert joined.add(second) is None
    with pytest.raises(ResourceExhausted, match=f"{2 * PART_BYTES + 1} bytes or more"):
        joined.add(third)
