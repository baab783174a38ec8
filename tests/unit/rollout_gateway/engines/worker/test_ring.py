"""The ring keeps rows whole and in order, wraps around, and drops instead of waiting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataLoss, InvalidInput
from paceline.services.rollout_gateway.engines.worker.ring import RowRing


def write(ring: RowRing, request_id: int, positions: list[int], version: int = 0) -> int:
    count = len(positions)
    hidden = np.array([[position % 251] * ring.row_bytes for position in positions], dtype=np.uint8)
    return ring.write(
        np.full(count, request_id, dtype=np.uint64),
        np.array(positions, dtype=np.uint32),
        np.array([position + 1000 for position in positions], dtype=np.uint32),
        version,
        hidden.reshape(count, ring.row_bytes),
    )


def test_a_reader_sees_what_the_writer_of_another_mapping_stamped() -> None:
    reader = RowRing.create(capacity=8, row_bytes=4)
    writer = RowRing.attach(reader.path)
    reader.seal()
    assert write(writer, 7, [3, 4], version=2) == 2
    rows = reader.read(writer.rows_written)
    assert rows["request_id"].tolist() == [7, 7]
    assert rows["position"].tolist() == [3, 4]
    assert rows["token_id"].tolist() == [1003, 1004]
    assert rows["policy_version"].tolist() == [2, 2]
    assert rows["hidden"].tolist() == [[3] * 4, [4] * 4]


def test_rows_without_room_are_dropped_and_counted() -> None:
    ring = RowRing.create(capacity=3, row_bytes=2)
    assert write(ring, 1, [0, 1]) == 2
    assert write(ring, 1, [2, 3, 4]) == 1
    assert (ring.rows_written, ring.rows_dropped) == (3, 2)
    assert ring.read(3)["position"].tolist() == [0, 1, 2]
    assert write(ring, 1, [5]) == 1


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), max_size=30), capacity=st.integers(1, 7))
def test_every_kept_row_is_read_once_and_in_order(sizes: list[int], capacity: int) -> None:
    ring = RowRing.create(capacity, row_bytes=1)
    kept: list[int] = []
    read: list[int] = []
    position = 0
    for turn, size in enumerate(sizes):
        positions = list(range(position, position + size))
        kept += positions[: write(ring, 1, positions)]
        position += size
        if turn % 2:
            read += ring.read(ring.rows_written)["position"].tolist()
    read += ring.read(ring.rows_written)["position"].tolist()
    assert read == kept
    assert ring.rows_dropped == position - len(kept)


def test_a_file_that_is_no_ring_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"\0" * 8192)
    with pytest.raises(DataLoss, match="not a ring"):
        RowRing.attach(path)
    path.write_bytes(b"short")
    with pytest.raises(DataLoss, match="too short"):
        RowRing.attach(path)


def test_rows_of_another_size_are_refused() -> None:
    ring = RowRing.create(capacity=2, row_bytes=4)
    other = RowRing.create(capacity=2, row_bytes=5)
    with pytest.raises(InvalidInput, match="do not fit"):
        ring.write(
            np.zeros(1, np.uint64),
            np.zeros(1, np.uint32),
            np.zeros(1, np.uint32),
            0,
            np.zeros((1, other.row_bytes), np.uint8),
        )
