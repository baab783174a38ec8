"""One sender's share of a version with its checksums, and announcements by one or several
senders."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import InvalidInput
from paceline.tensors import NUMPY_CODES, NamedTensor
from paceline.v1.engine_pb2 import WeightTarget
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_SPARSE_DELTA, Manifest, SparseDelta
from paceline.weights.chunks import (
    ChunkPart,
    content_hash,
    in_threads,
    joined_crc32,
    packed,
    stream_bytes,
)
from paceline.weights.handover import ScratchFile
from paceline.weights.manifest import CHUNK_BYTES, first_not_finite, not_finite, unchecked_manifest

Checked = tuple[int, int, int]
"""First byte in the stream, bytes, CRC-32."""


@dataclass(frozen=True, slots=True)
class Senders:
    """All senders of a version, from one sender's view."""

    rank: int
    exchange: Callable[[Any], list[Any]]
    """Returns every sender's value (JSON types) by rank, given this sender's; all senders call it
    in the same order.
    """


ALONE = Senders(0, lambda value: [value])
"""A single sender, which holds everything."""


class Checksums(NamedTuple):
    """Checksums of one content."""

    content_hash: str
    tensors: list[int]  # TensorSpec.crc32 of each


class HeldTensor(NamedTuple):
    """A tensor of the manifest, or a run of its elements."""

    number: int  # index in the manifest
    first: int  # first element
    tensor: NamedTensor
    position: int = 0  # of its first byte in the share's file


class CheckedRange(NamedTuple):
    """Bytes of a stream within one chunk, and of a content within one tensor."""

    start: int  # in the stream
    data: memoryview
    crc32: int
    position: int = 0  # in the share's file


@dataclass(frozen=True, slots=True)
class Share:
    """One sender's part of a version's content, in order."""

    held: tuple[HeldTensor, ...]
    ranges: tuple[CheckedRange, ...]
    file: ScratchFile | None = None  # file that holds the whole share

    @property
    def tensors(self) -> list[NamedTensor]:
        """The held tensors without their places."""
        return [one.tensor for one in self.held]


class Announced(NamedTuple):
    """A version announced as a full push, and this sender's share."""

    manifest: Manifest
    share: Share


def held_whole(tensors: Sequence[NamedTensor]) -> list[HeldTensor]:
    """The tensors as held by a single sender."""
    return [HeldTensor(index, 0, one) for index, one in enumerate(tensors)]


def share_of(
    manifest: Manifest, held: Sequence[HeldTensor], file: ScratchFile | None = None
) -> Share:
    """Checks the held tensors and reads every byte once. `held` ascends; with `file`, it is in that
    file.
    """
    ranges = in_threads(_checked, _pieces_of(manifest, held))
    return Share(tuple(held), tuple(ranges), file)


def checked_ranges(stream: memoryview, start: int, chunk_bytes: int) -> tuple[CheckedRange, ...]:
    """Checked ranges of bytes that start at `start` in a stream."""
    return tuple(map(_checked, _pieces(stream, start, chunk_bytes, 0)))


def facts_of(ranges: Iterable[CheckedRange]) -> list[Checked]:
    """The values of ranges that other senders receive."""
    return [(one.start, len(one.data), one.crc32) for one in ranges]


def cut_ranges(
    manifest: Manifest, ranges: Iterable[CheckedRange], wanted: Iterable[int]
) -> Iterator[ChunkPart]:
    """The parts of wanted chunks within the ranges."""
    chunks = set(wanted)
    for start, data, crc, position in ranges:
        index, offset = divmod(start, manifest.chunk_bytes)
        if index in chunks:
            yield ChunkPart(index, offset, data, crc, position)


def cut_tensors(
    manifest: Manifest, tensors: Sequence[NamedTensor], wanted: Iterable[int]
) -> Iterator[ChunkPart]:
    """The wanted chunks of a content held as a whole, read as they are cut. Raises InvalidInput
    when the tensors do not match the manifest.
    """
    described = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in manifest.tensors]
    given = [(one.name, one.dtype, tuple(one.shape)) for one in tensors]
    if described != given:
        pairs = zip(given, described, strict=False)
        odd = next((pair for pair in pairs if pair[0] != pair[1]), (len(given), len(described)))
        raise InvalidInput("tensors are not those of the manifest", seen=odd[0], allowed=odd[1])
    chunks = set(wanted)
    pieces = _pieces_of(manifest, held_whole(tensors))
    asked = (one for one in pieces if one[0] // manifest.chunk_bytes in chunks)
    yield from cut_ranges(manifest, map(_checked, asked), chunks)


def checksums_of(manifest: Manifest, tensors: Sequence[NamedTensor]) -> Checksums:
    """Checksums of a content held as a whole; every byte is read once."""
    return joined_checksums(manifest, [facts_of(share_of(manifest, held_whole(tensors)).ranges)])


def joined_checksums(manifest: Manifest, shares: Iterable[Iterable[Checked]]) -> Checksums:
    """Checksums of a content from the shares of all senders. Raises InvalidInput unless the shares
    cover each byte exactly once.
    """
    offsets = [spec.offset for spec in manifest.tensors]
    begins = set(offsets)
    checked = _in_order(shares, manifest.total_bytes)
    starts, crcs = _joined(checked, manifest.chunk_bytes, begins)
    tensors = []
    for spec in manifest.tensors:
        first, last = (bisect_left(starts, at) for at in (spec.offset, spec.offset + spec.nbytes))
        tensors.append(zlib.crc32(packed(crcs[first:last])))
    _, chunks = _joined(checked, manifest.chunk_bytes, frozenset())
    return Checksums(content_hash(chunks), tensors)


def joined_stream_hash(manifest: Manifest, shares: Iterable[Iterable[Checked]]) -> str:
    """content_hash of a stream from the shares of all senders. Raises InvalidInput as
    joined_checksums.
    """
    checked = _in_order(shares, stream_bytes(manifest))
    return content_hash(_joined(checked, manifest.chunk_bytes, frozenset())[1])


def _byte_of(manifest: Manifest, held: HeldTensor) -> int:
    itemsize = np.dtype(NUMPY_CODES[held.tensor.dtype]).itemsize
    return int(manifest.tensors[held.number].offset) + held.first * itemsize


def _pieces_of(
    manifest: Manifest, held: Iterable[HeldTensor]
) -> Iterator[tuple[int, memoryview, int]]:
    for one in held:
        start = _byte_of(manifest, one)
        yield from _pieces(one.tensor.view, start, manifest.chunk_bytes, one.position)


def _pieces(
    data: memoryview, start: int, chunk_bytes: int, position: int
) -> Iterator[tuple[int, memoryview, int]]:
    """For each chunk's part: first byte in the stream, bytes, first byte in the file."""
    at = 0
    while at < len(data):
        end = min(len(data), at + chunk_bytes - (start + at) % chunk_bytes)
        yield start + at, data[at:end], position + at
        at = end


def _checked(piece: tuple[int, memoryview, int]) -> CheckedRange:
    start, data, position = piece
    return CheckedRange(start, data, zlib.crc32(data), position)


def _in_order(shares: Iterable[Iterable[Checked]], total: int) -> list[Checked]:
    checked = sorted((start, nbytes, crc) for share in shares for start, nbytes, crc in share)
    position = 0
    for start, nbytes, _ in checked:
        if start != position:
            fault = "overlap" if start < position else "leave a gap"
            raise InvalidInput(f"shares of a version {fault}", seen=start, allowed=position)
        position += nbytes
    if position != total:
        raise InvalidInput("shares are not the whole version", seen=position, allowed=total)
    return checked


def _joined(
    checked: Iterable[Checked], chunk_bytes: int, begins: frozenset[int] | set[int]
) -> tuple[list[int], list[int]]:
    """First bytes and CRC-32s of the parts of a stream, cut at chunks and at `begins`."""
    starts: list[int] = []
    crcs: list[int] = []
    for start, nbytes, crc in checked:
        if start % chunk_bytes == 0 or start in begins:
            starts.append(start)
            crcs.append(crc)
        else:
            crcs[-1] = joined_crc32(crcs[-1], crc, nbytes)
    return starts, crcs


def build_manifest(
    target: WeightTarget | int,
    version: int,
    tensors: Sequence[NamedTensor],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    lm_head_hash: str = "",
    metadata: Mapping[str, str] | None = None,
) -> Manifest:
    """Manifest of a full push of `tensors` in this order. Reads every byte.

    Raises WeightsError when a number is not finite.
    """
    manifest = unchecked_manifest(
        target,
        version,
        [tensor.layout for tensor in tensors],
        chunk_bytes=chunk_bytes,
        lm_head_hash=lm_head_hash,
        metadata=metadata,
    )
    return check_share(manifest, held_whole(tensors)).manifest


def check_share(
    manifest: Manifest,
    held: Sequence[HeldTensor],
    senders: Senders = ALONE,
    file: ScratchFile | None = None,
) -> Announced:
    """This sender's share of a version. Completes the manifest with the checksums of all senders;
    each of them must call this. Reads every held byte. With `file`, all of the share is in that
    file.

    Raises WeightsError, at every sender, when a number is not finite; InvalidInput when the shares
    do not cover the version exactly.
    """
    odd = first_not_finite(one.tensor for one in held)
    share = share_of(manifest, held, file) if odd is None else Share((), ())
    shares = senders.exchange([odd, facts_of(share.ranges)])
    for name, _ in shares:
        if name is not None:
            raise not_finite(name)
    checksums = joined_checksums(manifest, [checked for _, checked in shares])
    manifest.content_hash = checksums.content_hash
    for spec, checksum in zip(manifest.tensors, checksums.tensors, strict=True):
        spec.crc32 = checksum
    return Announced(manifest, share)


def delta_manifest(
    whole: Manifest, base: Manifest, section: bytes, senders: Senders = ALONE
) -> tuple[Manifest, tuple[CheckedRange, ...]]:
    """The version `whole`, announced as a delta against `base`; both are full manifests. Its stream
    is the sections of all senders, by rank. Also returns this sender's part of the stream.
    """
    sizes = senders.exchange(len(section))
    manifest = Manifest()
    manifest.CopyFrom(whole)
    manifest.encoding = WEIGHT_ENCODING_SPARSE_DELTA
    manifest.base_version = base.version
    manifest.delta.CopyFrom(SparseDelta(nbytes=sum(sizes), base_hash=base.content_hash))
    start = sum(sizes[: senders.rank])
    ranges = checked_ranges(memoryview(section), start, manifest.chunk_bytes)
    shares = senders.exchange(facts_of(ranges))
    manifest.delta.stream_hash = joined_stream_hash(manifest, shares)
    return manifest, ranges
