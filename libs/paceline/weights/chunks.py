"""Cuts the stream of a version into chunks, and names contents by the checksums of theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paceline.errors import InvalidInput
from paceline.tensors import NamedTensor
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_SPARSE_DELTA, Manifest


class ChunkPart(NamedTuple):
    """What of a chunk travels at once."""

    chunk: int  # its index
    offset: int  # of the first byte in the chunk
    data: memoryview
    crc32: int
    position: int = 0  # of its first byte in the sender's file


def stream_bytes(manifest: Manifest) -> int:
    """Bytes that travel: the content, or the delta that stands for it."""
    delta = manifest.encoding == WEIGHT_ENCODING_SPARSE_DELTA
    return manifest.delta.nbytes if delta else manifest.total_bytes


def chunk_count(manifest: Manifest) -> int:
    """Number of chunks of the stream."""
    return int(-(-stream_bytes(manifest) // manifest.chunk_bytes))


def chunk_span(manifest: Manifest, index: int) -> tuple[int, int]:
    """Byte range of chunk `index`; InvalidInput when there is none."""
    if not 0 <= index < chunk_count(manifest):
        raise InvalidInput(
            "chunk index is out of range", seen=index, allowed=f"0 to {chunk_count(manifest) - 1}"
        )
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, stream_bytes(manifest))


def cut_chunks(
    manifest: Manifest, tensors: Sequence[NamedTensor], wanted: Iterable[int]
) -> Iterator[tuple[int, memoryview]]:
    """(index, bytes) of each wanted chunk of a full push; a view where the chunk lies within one
    tensor, else a joined copy.

    `wanted` ascends. Raises InvalidInput when the tensors are not those of the manifest.
    """
    for index, parts in _cut(manifest, tensors, wanted):
        yield index, parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def content_hash(checksums: Iterable[int]) -> str:
    """Name of a content or a stream: sha256 over the chunks' CRC-32, each a little-endian u32,
    hex.
    """
    return hashlib.sha256(packed(checksums)).hexdigest()


def packed(checksums: Iterable[int]) -> bytes:
    """CRC-32s one behind the other, little-endian u32 each."""
    return b"".join(crc.to_bytes(4, "little") for crc in checksums)


def _cut(
    manifest: Manifest, tensors: Sequence[NamedTensor], wanted: Iterable[int]
) -> Iterator[tuple[int, list[memoryview]]]:
    described = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in manifest.tensors]
    given = [(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    if described != given:
        odd = next(
            (pair for pair in zip(given, described, strict=False) if pair[0] != pair[1]),
            (len(given), len(described)),
        )
        raise InvalidInput("tensors are not those of the manifest", seen=odd[0], allowed=odd[1])

    first = 0
    for index in wanted:
        start, end = chunk_span(manifest, index)
        while manifest.tensors[first].offset + manifest.tensors[first].nbytes <= start:
            first += 1
        yield index, _parts(manifest, tensors, first, start, end)


def _parts(
    manifest: Manifest, tensors: Sequence[NamedTensor], first: int, start: int, end: int
) -> list[memoryview]:
    """Bytes [start, end) of the content; tensor `first` holds byte `start`."""
    parts = []
    while start < end:
        offset = manifest.tensors[first].offset
        data = tensors[first].view[start - offset : end - offset]
        if data:
            parts.append(data)
        start += len(data)
        first += 1
    return parts
