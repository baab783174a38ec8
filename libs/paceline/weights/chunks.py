"""Places of chunks in a version's stream, and names of contents by their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from paceline.errors import InvalidInput
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_SPARSE_DELTA, Manifest


class ChunkPart(NamedTuple):
    """A part of a chunk that is sent at once."""

    chunk: int  # index of the chunk
    offset: int  # of the first byte in the chunk
    data: memoryview
    crc32: int
    position: int = 0  # of the first byte in the sender's file


def stream_bytes(manifest: Manifest) -> int:
    """Bytes to send: the content, or its delta."""
    delta = manifest.encoding == WEIGHT_ENCODING_SPARSE_DELTA
    return manifest.delta.nbytes if delta else manifest.total_bytes


def chunk_count(manifest: Manifest) -> int:
    """Number of chunks of the stream."""
    return int(-(-stream_bytes(manifest) // manifest.chunk_bytes))


def chunk_span(manifest: Manifest, index: int) -> tuple[int, int]:
    """Byte range of chunk `index`; raises InvalidInput for an index out of range."""
    if not 0 <= index < chunk_count(manifest):
        raise InvalidInput(
            "chunk index is out of range", seen=index, allowed=f"0 to {chunk_count(manifest) - 1}"
        )
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, stream_bytes(manifest))


def content_hash(checksums: Iterable[int]) -> str:
    """Name of a content or a stream: sha256 over the chunks' CRC-32s, each a little-endian u32, in
    hex.
    """
    return hashlib.sha256(packed(checksums)).hexdigest()


def packed(checksums: Iterable[int]) -> bytes:
    """CRC-32s in sequence, each a little-endian u32."""
    return b"".join(crc.to_bytes(4, "little") for crc in checksums)
