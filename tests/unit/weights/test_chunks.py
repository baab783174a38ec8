"""Memory of versions: it is kept for the next one, and no view of it changes meanwhile."""

import numpy as np

from paceline.weights import chunks

SIZE = 3 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def test_the_memory_of_a_dropped_version_serves_the_next_one_of_its_size() -> None:
    first = chunks.allocate(SIZE)
    place = address(first)
    part = first[5:10]
    del first
    other = chunks.allocate(SIZE)
    assert address(other) != place, "a view of it is still held"
    del part
    assert address(chunks.allocate(SIZE + 4096)) != place
    assert address(chunks.allocate(SIZE)) == place


def test_memory_of_a_large_share_of_the_machine_is_not_kept() -> None:
    chunks._spare.clear()
    small, large = SIZE, chunks.memory_bytes() // chunks.KEPT_SHARE + 4096
    for nbytes in (small, large):
        chunks.allocate(nbytes)
    assert [*map(len, chunks._spare)] == [small]
