"""One version while it arrives."""

from __future__ import annotations

import zlib

import pytest

from paceline.errors import DataLoss, InvalidInput
from paceline.tensors import NamedTensor
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.weights import build_manifest
from paceline.weights.assembly import Assembly
from paceline.weights.wire import PushChunk

STREAM = bytes(range(256)) * 20
CHUNK = 4096


def assembly() -> Assembly:
    tensor = NamedTensor("w", "U8", (len(STREAM),), STREAM)
    return Assembly(
        build_manifest(WEIGHT_TARGET_DRAFTER, 2, [tensor], chunk_bytes=CHUNK), max_bytes=1 << 20
    )


def chunk(index: int, data: bytes | None = None) -> PushChunk:
    data = STREAM[index * CHUNK : (index + 1) * CHUNK] if data is None else data
    return PushChunk(WEIGHT_TARGET_DRAFTER, 2, index, zlib.crc32(data), memoryview(data))


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


def test_complete_version_still_asks_for_a_chunk_to_finish_with() -> None:
    one = assembly()
    assert one.wanted() == [0, 1]
    one.place(chunk(0))
    one.place(chunk(1))
    assert one.wanted() == [1]
