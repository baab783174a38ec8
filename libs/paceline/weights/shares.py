"""One sender's share of a version with its checksums, and announcements by one or several
senders."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import InvalidInput
from paceline.tensors import NUMPY_CODES, NamedTensor
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_SPARSE_DELTA, Manifest, SparseDelta
from paceline.weights import chunks
from paceline.weights.chunks import CheckedRange
from paceline.weights.manifest import first_not_finite, not_finite

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


class HeldTensor(NamedTuple):
    """A tensor of the manifest, or a run of its elements."""

    number: int  # index in the manifest
    first: int  # first element
    tensor: NamedTensor


class Announced(NamedTuple):
    """A version announced as a full push, and this sender's part of its content, in order."""

    manifest: Manifest
    held: tuple[HeldTensor, ...]
    ranges: tuple[CheckedRange, ...]

    @property
    def tensors(self) -> list[NamedTensor]:
        """The held tensors without their places."""
        return [one.tensor for one in self.held]


def held_whole(tensors: Sequence[NamedTensor]) -> list[HeldTensor]:
    """The tensors as held by a single sender."""
    return [HeldTensor(index, 0, one) for index, one in enumerate(tensors)]


def cut_ranges(
    manifest: Manifest, ranges: Iterable[CheckedRange], wanted: Iterable[int]
) -> Iterator[CheckedRange]:
    """The ranges within wanted chunks."""
    asked = set(wanted)
    return (one for one in ranges if one.start // manifest.chunk_bytes in asked)


def joined_hash(shares: Iterable[Iterable[Checked]], total: int, chunk_bytes: int) -> str:
    """content_hash of a stream of `total` bytes from the shares of all senders. Raises InvalidInput
    unless the shares cover each byte exactly once.
    """
    position, crcs = 0, list[int]()
    for start, nbytes, crc in sorted(chain.from_iterable(shares)):
        if start != position:
            fault = "overlap" if start < position else "leave a gap"
            raise InvalidInput(f"shares of a version {fault}", seen=start, allowed=position)
        if start % chunk_bytes:
            crcs[-1] = chunks.joined_crc32(crcs[-1], crc, nbytes)
        else:
            crcs.append(crc)
        position += nbytes
    if position != total:
        raise InvalidInput("shares are not the whole version", seen=position, allowed=total)
    return chunks.content_hash(crcs)


def _facts_of(ranges: Iterable[CheckedRange]) -> list[Checked]:
    """The values of ranges that other senders receive."""
    return [(one.start, len(one.data), one.crc32) for one in ranges]


def _pieces_of(manifest: Manifest, held: Iterable[HeldTensor]) -> Iterator[tuple[int, memoryview]]:
    for number, first, tensor in held:
        itemsize = np.dtype(NUMPY_CODES[tensor.dtype]).itemsize
        start = int(manifest.tensors[number].offset) + first * itemsize
        yield from _pieces(tensor.view, start, manifest.chunk_bytes)


def _pieces(data: memoryview, start: int, chunk_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """For each chunk's part: first byte in the stream, and bytes."""
    at = 0
    while at < len(data):
        end = min(len(data), at + chunk_bytes - (start + at) % chunk_bytes)
        yield start + at, data[at:end]
        at = end


def check_share(
    manifest: Manifest, held: Sequence[HeldTensor], senders: Senders = ALONE
) -> Announced:
    """This sender's share of a version; `held` ascends. Completes the manifest with the hash over
    all senders; each of them must call this. Reads every held byte.

    Raises WeightsError, at every sender, when a number is not finite; InvalidInput when the shares
    do not cover the version exactly.
    """
    odd = first_not_finite(one.tensor for one in held)
    pieces = () if odd else _pieces_of(manifest, held)
    ranges = tuple(chunks.in_threads(lambda piece: chunks.checked_range(*piece), pieces))
    shares = senders.exchange([odd, _facts_of(ranges)])
    if name := next(filter(None, (name for name, _ in shares)), ""):
        raise not_finite(name)
    checked = [one for _, one in shares]
    manifest.content_hash = joined_hash(checked, manifest.total_bytes, manifest.chunk_bytes)
    return Announced(manifest, tuple(held), ranges)


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
    pieces = _pieces(memoryview(section), sum(sizes[: senders.rank]), manifest.chunk_bytes)
    ranges = tuple(starmap(chunks.checked_range, pieces))
    shares = senders.exchange(_facts_of(ranges))
    manifest.delta.stream_hash = joined_hash(shares, sum(sizes), manifest.chunk_bytes)
    return manifest, ranges
