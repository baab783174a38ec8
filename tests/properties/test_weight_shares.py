"""Several senders of one version compute the same checksums as a single sender."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInput
from paceline.tensors import NamedTensor
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY
from paceline.v1.weights_pb2 import Manifest
from paceline.weights.chunks import content_hash, joined_crc32
from paceline.weights.manifest import unchecked_manifest
from paceline.weights.shares import Checked, HeldTensor, Senders, check_share, joined_hash

CHUNK = 4096


@given(st.binary(max_size=5000), st.binary(max_size=5000))
def test_the_crc_of_two_ranges_follows_from_theirs(one: bytes, other: bytes) -> None:
    joined = joined_crc32(zlib.crc32(one), zlib.crc32(other), len(other))
    assert joined == zlib.crc32(one + other)


@given(st.integers(0, 1 << 40), st.integers(0, 2**32 - 1))
def test_a_range_of_zeros_of_any_length_is_appended(nbytes: int, crc: int) -> None:
    half = joined_crc32(crc, 0, nbytes // 2)
    assert joined_crc32(half, 0, nbytes - nbytes // 2) == joined_crc32(crc, 0, nbytes)


@st.composite
def shared(draw: st.DrawFn) -> tuple[Manifest, list[NamedTensor], list[list[HeldTensor]]]:
    """Draw tensors; each sender holds the part between two cuts, in any order of senders."""
    count = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.sampled_from([0, 1, 7, 300, CHUNK, 9000]), min_size=1, max_size=6))
    tensors = [
        NamedTensor(f"t{index}", "U8", (size,), draw(st.randoms()).randbytes(size))
        for index, size in enumerate([*sizes, 3])
    ]
    held: list[list[HeldTensor]] = [[] for _ in range(count)]
    for index, one in enumerate(tensors):
        (size,) = one.shape
        cuts = sorted(draw(st.integers(0, size)) for _ in range(count - 1))
        order = draw(st.permutations(range(count)))
        for rank, first, last in zip(order, [0, *cuts], [*cuts, size], strict=True):
            part = NamedTensor(one.name, "U8", (last - first,), one.view[first:last])
            held[rank].append(HeldTensor(index, first, part))
    layouts = [one.layout for one in tensors]
    manifest = unchecked_manifest(WEIGHT_TARGET_POLICY, 1, layouts, chunk_bytes=CHUNK)
    return manifest, tensors, held


def facts_of(manifest: Manifest, held: list[list[HeldTensor]]) -> list[Checked]:
    """The checked ranges of all senders; the first one announces the version."""
    facts: list[Checked] = []

    def exchange(own: list[object]) -> list[object]:
        facts.extend(own[1])  # type: ignore[arg-type]
        return [[None, [(0, manifest.total_bytes, 0)]]]

    for share in held:
        check_share(manifest, share, Senders(0, exchange))
    return facts


@given(shared())
def test_the_joined_hash_is_that_of_the_whole(
    version: tuple[Manifest, list[NamedTensor], list[list[HeldTensor]]],
) -> None:
    manifest, tensors, held = version
    content = b"".join(bytes(one.view) for one in tensors)
    joined = joined_hash([facts_of(manifest, held)], len(content), CHUNK)
    chunks = [zlib.crc32(content[at : at + CHUNK]) for at in range(0, len(content), CHUNK)]
    assert joined == content_hash(chunks)


@given(shared(), st.data())
def test_shares_that_overlap_or_leave_a_gap_are_refused(
    version: tuple[Manifest, list[NamedTensor], list[list[HeldTensor]]], data: st.DataObject
) -> None:
    manifest, _, held = version
    facts = facts_of(manifest, held)
    number = data.draw(st.integers(0, len(facts) - 1))
    twice = data.draw(st.booleans())
    changed = [*facts, facts[number]] if twice else [*facts[:number], *facts[number + 1 :]]
    with pytest.raises(InvalidInput, match="overlap" if twice else "gap|not the whole version"):
        joined_hash([changed], manifest.total_bytes, CHUNK)
