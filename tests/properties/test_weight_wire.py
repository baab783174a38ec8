"""The handmade bytes of a PushRequest against the generated class as oracle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import PushRequest
from paceline.weights.push import encode_push

U32 = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
U64 = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
CONTEXTS = st.none() | st.builds(CommandContext, run_id=st.text(max_size=70), step=U64, epoch=U64)
HEADS = st.builds(
    PushRequest,
    target=st.integers(0, 3),
    version=U64,
    chunk_index=U32,
    crc32=U32,
    context=CONTEXTS,
    offset=U32,
)


@given(HEADS, st.binary(max_size=400) | st.just(bytes(1 << 15)))
def test_the_generated_class_parses_a_head_and_its_data(head: PushRequest, data: bytes) -> None:
    whole = PushRequest()
    whole.CopyFrom(head)
    whole.data = data
    assert PushRequest.FromString(encode_push(head, memoryview(data))) == whole
