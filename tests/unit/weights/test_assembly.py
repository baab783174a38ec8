"""One version while it arrives."""

from __future__ import annotations

import zlib

import pytest
from whole_versions import build_manifest

from paceline.errors import DataLoss, InvalidInput, ResourceExhausted
from paceline.tensors import NamedTensor
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.v1.weights_pb2 import PushRequest
from paceline.weights.assembly import Assembly

STREAM = bytes(range(256)) * 20
CHUNK = 4096


def assembly() -> Assembly:
    tensor = NamedTensor("w", "U8", (len(STREAM),), STREAM)
    return Assembly(build_manifest(WEIGHT_TARGET_DRAFTER, 2, [tensor], chunk_bytes=CHUNK))


def chunk(index: int, data: bytes | None = None) -> PushRequest:
    data = STREAM[index * CHUNK : (index + 1) * CHUNK] if data is None else data
    return part(index, 0, data)


def test_chunks_arrive_in_any_order_and_twice() -> None:
    one = assembly()
    for index in (1, 1, 0):
        assert not one.complete
        one.place(chunk(index))
    assert one.complete
    assert bytes(one.buffer) == STREAM
    one.check_content()


def test_other_bytes_for_a_chunk_that_is_in_are_data_loss() -> None:
    one = assembly()
    one.place(chunk(0))
    with pytest.raises(DataLoss, match="corrupt"):
        one.place(chunk(0, bytes(CHUNK)))
    assert one.missing() == [1]


def test_wrong_length_and_wrong_index_are_refused() -> None:
    one = assembly()
    with pytest.raises(InvalidInput, match="wrong length") as refusal:
        one.place(chunk(1, STREAM[:CHUNK]))
    assert (refusal.value.seen, refusal.value.allowed) == ("4096", "1024")
    with pytest.raises(InvalidInput, match="index"):
        one.place(chunk(2, b""))


def test_a_chunk_that_lost_its_data_on_the_way_is_data_loss() -> None:
    damaged = chunk(1)
    damaged.data = b""  # as a damaged tag leaves it
    with pytest.raises(DataLoss, match="corrupt"):
        assembly().place(damaged)


def test_complete_version_still_asks_for_a_chunk_to_finish_with() -> None:
    one = assembly()
    assert one.wanted() == [0, 1]
    one.place(chunk(0))
    one.place(chunk(1))
    assert one.wanted() == [1]


def part(index: int, offset: int, data: bytes) -> PushRequest:
    crc = zlib.crc32(data)
    return PushRequest(version=2, chunk_index=index, crc32=crc, data=data, offset=offset)


def test_parts_of_a_chunk_arrive_in_any_order_and_twice() -> None:
    one = assembly()
    one.place(chunk(1))
    for first, last in ((100, 900), (0, 100), (0, 100), (2000, CHUNK), (900, 2000)):
        assert not one.complete
        one.place(part(0, first, STREAM[first:last]))
    assert one.complete
    assert bytes(one.buffer) == STREAM
    one.check_content()
    one.place(part(0, 7, STREAM[7:9]))


def test_parts_that_touch_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.weights.assembly.MOST_PARTS", 1)
    one = assembly()
    for first in range(CHUNK):
        one.place(part(0, first, STREAM[first : first + 1]))
    assert one.missing() == [1]


def test_parts_that_overlap_are_joined() -> None:
    one = assembly()
    for first, last in ((0, 100), (200, 900), (50, 300), (850, 950), (950, CHUNK)):
        assert one.missing() == [0, 1]
        one.place(part(0, first, STREAM[first:last]))
    assert one.missing() == [1]
    assert bytes(one.buffer[:CHUNK]) == STREAM[:CHUNK]


def test_other_bytes_for_a_part_of_a_complete_chunk_are_data_loss() -> None:
    one = assembly()
    one.place(chunk(0))
    with pytest.raises(DataLoss, match="corrupt"):
        one.place(part(0, 15, bytes(10)))
    assert bytes(one.buffer[10:20]) == STREAM[10:20]


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 0), (4000, 97), (4096, 1), (1 << 31, 1)], ids=str
)
def test_a_part_that_its_chunk_does_not_have_is_refused(offset: int, length: int) -> None:
    one = assembly()
    with pytest.raises(InvalidInput, match="wrong length"):
        one.place(part(0, offset, bytes(length)))
    assert one.missing() == [0, 1]


def test_too_many_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.weights.assembly.MOST_PARTS", 3)
    one = assembly()
    for first in (0, 10, 20):
        one.place(part(0, first, STREAM[first : first + 1]))
    with pytest.raises(ResourceExhausted, match="too many parts; seen: 4; allowed: 3"):
        one.place(part(1, 0, STREAM[CHUNK : CHUNK + 1]))
    one.place(chunk(0))
    one.place(part(1, 0, STREAM[CHUNK : CHUNK + 1]))
