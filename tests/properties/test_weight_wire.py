"""The hand-written PushRequest against the generated class as oracle, in both directions."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import DataLoss
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import PushRequest
from paceline.weights.wire import PushChunk, decode_push, encode_push

U32 = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
U64 = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
CONTEXTS = st.none() | st.builds(CommandContext, run_id=st.text(max_size=70), step=U64, epoch=U64)
CHUNKS = st.builds(
    PushChunk,
    target=st.integers(0, 3),
    version=U64,
    chunk_index=U32,
    crc32=U32,
    data=st.binary(max_size=400).map(memoryview),
    context=CONTEXTS,
    offset=U32,
)


REQUESTS = st.builds(
    PushRequest,
    target=st.integers(-(2**31), 2**31 - 1),
    version=U64,
    chunk_index=U32,
    crc32=U32,
    data=st.binary(min_size=1, max_size=400),
    context=CONTEXTS,
    offset=U32,
)


def same(chunk: PushChunk, request: PushRequest) -> bool:
    context = request.context if request.HasField("context") else None
    ours = (
        chunk.target,
        chunk.version,
        chunk.chunk_index,
        chunk.crc32,
        bytes(chunk.data),
        chunk.context,
        chunk.offset,
    )
    theirs = (
        request.target,
        request.version,
        request.chunk_index,
        request.crc32,
        request.data,
        context,
        request.offset,
    )
    return ours == theirs


@given(CHUNKS)
def test_generated_class_parses_what_we_encode(chunk: PushChunk) -> None:
    assert same(chunk, PushRequest.FromString(encode_push(chunk)))


@given(REQUESTS)
def test_we_parse_what_the_generated_class_encodes(request: PushRequest) -> None:
    assert same(decode_push(request.SerializeToString()), request)


@pytest.mark.parametrize("message", [b"\x80\x01\x07", b"\x39" + bytes(8), b"\x7a\x01xy"])
def test_unknown_fields_and_bytes_behind_the_data_are_data_loss(message: bytes) -> None:
    with pytest.raises(DataLoss):
        decode_push(message if message[0] == 0x7A else message + b"\x7a\x01x")


@given(REQUESTS.map(PushRequest.SerializeToString), st.data())
def test_cut_or_spoiled_bytes_parse_like_the_generated_class_or_are_data_loss(
    message: bytes, data: st.DataObject
) -> None:
    spoiled = bytearray(message[: data.draw(st.integers(0, len(message)))])
    if spoiled:
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    try:
        chunk = decode_push(bytes(spoiled))
    except DataLoss:
        return
    assert same(chunk, PushRequest.FromString(bytes(spoiled)))


@example(b"\xb5\x80\x80\x80\x10\x00\x00\x00\x00\x08\x00")  # a tag beyond 32 bits
@example(b"\x88\x80\x80\x80\x80\x00\x01")  # a tag in six bytes
@given(st.binary(max_size=60))
def test_what_the_generated_class_refuses_is_data_loss(message: bytes) -> None:
    try:
        PushRequest.FromString(message)
    except DecodeError:
        with pytest.raises(DataLoss):
            decode_push(message)


def test_a_message_of_thousands_of_fields_is_refused_early() -> None:
    with pytest.raises(DataLoss, match="tag 8 at byte"):
        decode_push(b"\x08\x01" * 4_000_000)


def test_decoded_data_is_a_view_of_the_message() -> None:
    message = encode_push(PushChunk(1, 2, 3, 4, memoryview(b"bytes"), None))
    assert decode_push(message).data.obj is message
