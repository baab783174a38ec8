"""Manifests: rejected content, and the cuts of the stream."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_versions import announced, build_manifest

from paceline.errors import InvalidInput
from paceline.tensors import NamedTensor
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_FULL, Manifest, TensorSpec
from paceline.weights.chunks import chunk_count, chunk_span
from paceline.weights.manifest import check_manifest, whole_of
from paceline.weights.shares import cut_ranges, delta_manifest

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
    ranges = announced(WEIGHT_TARGET_POLICY, 1, tensors, chunk_bytes=CHUNK).ranges
    everything = range(chunk_count(manifest))
    for wanted in (set(everything), data.draw(st.sets(st.sampled_from(everything)))):
        chunks = dict.fromkeys(sorted(wanted), b"")
        for start, part, crc in cut_ranges(manifest, ranges, wanted):
            index, offset = divmod(start, CHUNK)
            assert (offset, crc) == (len(chunks[index]), zlib.crc32(part))
            chunks[index] += part
        for index, chunk in chunks.items():
            assert chunk == stream[index * CHUNK : (index + 1) * CHUNK]


def test_content_hash_tells_contents_apart_that_share_all_shapes() -> None:
    one, _, _ = built([5000])
    tensor = NamedTensor("t0", "U8", (5000,), bytes(5000))
    other = build_manifest(WEIGHT_TARGET_POLICY, 1, [tensor], chunk_bytes=CHUNK)
    assert other.content_hash != one.content_hash
    other.content_hash = one.content_hash
    assert other == one


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=6).filter(any))
def test_the_content_hash_is_that_of_the_chunks(sizes: list[int]) -> None:
    manifest, _, stream = built(sizes)
    cut = [zlib.crc32(stream[at : at + CHUNK]) for at in range(0, len(stream), CHUNK)]
    assert manifest.content_hash == sha256(b"".join(map(u32, cut))).hexdigest()


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def spoil(change: Callable[[Manifest], object]) -> Manifest:
    manifest, _, _ = built([5000, 300])
    change(manifest)
    return manifest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.ClearField("target"), "target"),
        (lambda one: one.ClearField("encoding"), "encoding of a push is unknown"),
        (lambda one: setattr(one, "encoding", 3), "seen: 3; allowed: WEIGHT_ENCODING_FULL, WEIGHT"),
        (lambda one: setattr(one, "chunk_bytes", 100), "chunk_bytes"),
        (lambda one: setattr(one, "total_bytes", 5301), "sum of the tensors"),
        (lambda one: setattr(one, "total_bytes", 10**9), "sum of the tensors"),
        (lambda one: setattr(one, "total_bytes", 0), "no bytes"),
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
        check_manifest(spoil(change))


def spoil_delta(change: Callable[[Manifest], object]) -> Manifest:
    base, _, _ = built([5000, 300])
    whole, _, _ = built([5000, 300])
    whole.version = 2
    manifest, _ = delta_manifest(whole, base, b"delta")
    change(manifest)
    return manifest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.ClearField("delta"), "a base and a delta stand"),
        (lambda one: setattr(one, "encoding", WEIGHT_ENCODING_FULL), "a base and a delta stand"),
        (lambda one: setattr(one, "base_version", 2), "its own base; seen: 2"),
        (lambda one: setattr(one.delta, "nbytes", 0), "seen: 0; allowed: 1 to 5300"),
        (lambda one: setattr(one.delta, "nbytes", 5301), "seen: 5301; allowed: 1 to 5300"),
        (lambda one: setattr(one, "content_hash", ""), "a delta names its content"),
        (lambda one: one.delta.ClearField("stream_hash"), "a delta names its content"),
        (lambda one: one.delta.ClearField("base_hash"), "a delta names its content"),
        (lambda one: setattr(one.tensors[1], "nbytes", 299), "nbytes of t1"),
        (lambda one: setattr(one.tensors[1], "dtype", "F128"), "dtype"),
        (lambda one: setattr(one, "total_bytes", 10**9), "sum of the tensors"),
        (lambda one: setattr(one, "total_bytes", 0), "no bytes"),
    ],
)
def test_manifest_of_a_delta_that_cannot_be_received_is_refused(
    change: Callable[[Manifest], object], words: str
) -> None:
    check_manifest(spoil_delta(lambda _: None))
    with pytest.raises(InvalidInput, match=words):
        check_manifest(spoil_delta(change))


def test_a_full_push_that_names_a_base_is_refused() -> None:
    with pytest.raises(InvalidInput, match="FULL on version 3"):
        check_manifest(spoil(lambda one: setattr(one, "base_version", 3)))


def test_a_delta_stands_for_the_version_that_a_full_push_announces() -> None:
    base, _, _ = built([5000, 300])
    whole, _, _ = built([5000, 300])
    whole.version = 2
    delta, _ = delta_manifest(whole, base, b"delta")
    assert (chunk_count(delta), chunk_span(delta, 0)) == (1, (0, 5))
    assert whole_of(delta) == whole
    assert whole_of(whole) is whole


def test_a_chunk_beyond_the_end_is_refused() -> None:
    manifest, _, _ = built([5000])
    with pytest.raises(InvalidInput, match="0 to 1"):
        chunk_span(manifest, 2)
