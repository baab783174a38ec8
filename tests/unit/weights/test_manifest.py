"""Manifests: what is refused, and how the stream is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInput
from paceline.tensors import NamedTensor
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY
from paceline.v1.weights_pb2 import Manifest, TensorSpec
from paceline.weights import build_manifest
from paceline.weights.manifest import check_manifest, chunk_count, chunk_span, cut_chunks

CHUNK = 4096


def built(sizes: list[int]) -> tuple[Manifest, list[NamedTensor], bytes]:
    stream = bytes(index * 31 % 251 for index in range(sum(sizes)))
    tensors, start = [], 0
    for number, size in enumerate(sizes):
        tensors.append(NamedTensor(f"t{number}", "U8", (size,), stream[start : start + size]))
        start += size
    return build_manifest(WEIGHT_TARGET_POLICY, 1, tensors, chunk_bytes=CHUNK), tensors, stream


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=6).filter(any), st.data())
def test_chunks_are_the_stream_cut_at_multiples(sizes: list[int], data: st.DataObject) -> None:
    manifest, tensors, stream = built(sizes)
    everything = range(chunk_count(manifest))
    assert b"".join(bytes(part) for _, part in cut_chunks(manifest, tensors, everything)) == stream
    wanted = sorted(data.draw(st.sets(st.sampled_from(everything))))
    for index, part in cut_chunks(manifest, tensors, wanted):
        assert bytes(part) == stream[index * CHUNK : (index + 1) * CHUNK]


def test_content_hash_tells_contents_apart_that_share_all_shapes() -> None:
    one, _, _ = built([5000])
    tensor = NamedTensor("t0", "U8", (5000,), bytes(5000))
    other = build_manifest(WEIGHT_TARGET_POLICY, 1, [tensor], chunk_bytes=CHUNK)
    assert other.content_hash != one.content_hash
    other.content_hash = one.content_hash
    assert other == one


def spoil(change: Callable[[Manifest], object]) -> Manifest:
    manifest, _, _ = built([5000, 300])
    change(manifest)
    return manifest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.ClearField("target"), "target"),
        (lambda one: one.ClearField("encoding"), "full pushes"),
        (lambda one: setattr(one, "chunk_bytes", 100), "chunk_bytes"),
        (lambda one: setattr(one, "total_bytes", 5301), "sum of the tensors"),
        (lambda one: setattr(one, "total_bytes", 10**9), "total_bytes"),
        (lambda one: setattr(one.tensors[1], "offset", 4999), "overlaps"),
        (lambda one: setattr(one.tensors[1], "offset", 5001), "leaves a gap"),
        (lambda one: setattr(one.tensors[1], "nbytes", 299), "nbytes"),
        (lambda one: setattr(one.tensors[1], "dtype", "F128"), "dtype"),
        (lambda one: one.tensors[0].shape.append(2), "nbytes"),
        (lambda one: setattr(one.tensors[1], "name", "t0"), "same name"),
        (lambda one: one.tensors[0].shape.extend([1] * 100_000), "dimensions; seen: 100001"),
        (lambda one: one.tensors[0].shape.extend([2**31, 2**31]), "larger than any memory"),
        (
            lambda one: one.tensors.extend(TensorSpec(name=str(i)) for i in range(100_000)),
            "too many tensors; seen: 100002; allowed: at most 100000",
        ),
    ],
)
def test_manifest_that_cannot_be_received_is_refused(
    change: Callable[[Manifest], object], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        check_manifest(spoil(change), max_bytes=1 << 20)


def test_chunk_beyond_the_end_and_foreign_tensors_are_refused() -> None:
    manifest, tensors, _ = built([5000])
    with pytest.raises(InvalidInput, match="0 to 1"):
        chunk_span(manifest, 2)
    with pytest.raises(InvalidInput, match="not those of the manifest"):
        list(cut_chunks(manifest, [*tensors, NamedTensor("x", "U8", (1,), b"x")], [0]))
