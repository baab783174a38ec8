"""One version during its arrival: its buffer and its received chunks.

The next destination of the bytes is decided elsewhere (spool, servicer).
"""

import asyncio
import time
import zlib
from collections.abc import Callable

from paceline.errors import DataLoss, InvalidInput, ResourceExhausted
from paceline.tensors import NamedTensor
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_SPARSE_DELTA, Manifest, PushRequest
from paceline.weights import chunks
from paceline.weights.manifest import check_finite, check_manifest, version_name, views

MOST_PARTS = 1 << 18
"""Largest number of parts of one version in incomplete chunks that do not touch each other."""


class Assembly:
    """A buffer of the stream's bytes, and the checksum of each received chunk, whole or in parts.
    Writes are idempotent.
    """

    def __init__(
        self, manifest: Manifest, allocated: Callable[[int], memoryview] = chunks.allocate
    ) -> None:
        """`allocated`: returns a buffer of that many bytes. Raises InvalidInput for an
        invalid manifest, ResourceExhausted.
        """
        check_manifest(manifest)
        self.manifest = manifest
        self.buffer = allocated(chunks.stream_bytes(manifest))
        self._checksums: list[int | None] = [None] * chunks.chunk_count(manifest)
        # of incomplete chunks: first and last byte in the chunk
        self._parts: dict[int, dict[int, int]] = {}
        self._count_of_parts = 0
        self._missing = len(self._checksums)
        self.arrived: list[int] = []  # complete chunks, in the order of their completion
        self.news = asyncio.Event()  # set when a chunk is complete
        self._started_s = 0.0
        self.receive_s = 0.0  # seconds from the first chunk to the last; 0 until complete

    @property
    def complete(self) -> bool:
        """Whether all chunks are received and checked."""
        return not self._missing

    @property
    def is_delta(self) -> bool:
        """Whether the stream is a delta, not the content itself."""
        return self.manifest.encoding == WEIGHT_ENCODING_SPARSE_DELTA

    def missing(self) -> list[int]:
        """Indices of missing chunks."""
        return [index for index, checksum in enumerate(self._checksums) if checksum is None]

    def wanted(self) -> list[int]:
        """Chunks to request. Never empty, so that a Push can finish the work of an earlier one that
        failed after its last chunk.
        """
        return self.missing() or [len(self._checksums) - 1]

    def place(self, chunk: PushRequest) -> int:
        """Checks a chunk or part, copies it into its place and returns its number of bytes. A chunk
        that is already complete is compared with it. Bytes of an incomplete chunk replace earlier
        ones.

        Raises DataLoss on a wrong checksum or other bytes, InvalidInput on a wrong index or length,
        ResourceExhausted on too many parts.
        """
        index, data = chunk.chunk_index, chunk.data
        start, end = chunks.chunk_span(self.manifest, index)
        first, last = start + chunk.offset, start + chunk.offset + len(data)
        self._check(chunk, zlib.crc32(data), chunk.crc32)  # damaged requests are sent again
        if not first < last <= end:
            message = f"{self._name(chunk)} has a wrong length"
            allowed = f"1 to {end - first}" if chunk.offset else end - start
            raise InvalidInput(message, seen=len(data), allowed=allowed)
        self._started_s = self._started_s or time.monotonic()
        if self._checksums[index] is not None:
            self._check(chunk, chunk.crc32, zlib.crc32(self.buffer[first:last]))
            return len(data)
        whole = self._add_part(index, first - start, last - start) == end - start
        self.buffer[first:last] = data
        if whole:
            alone = len(data) == end - start  # the chunk is one checked part
            crc = chunk.crc32 if alone else zlib.crc32(self.buffer[start:end])
            self._finish_chunk(index, crc)
        return len(data)

    def _add_part(self, index: int, first: int, last: int) -> int:
        """Records a part, joined with the parts that it touches; returns the number of received
        bytes of its chunk.
        """
        known = self._parts.setdefault(index, {})
        for at, end in [*known.items()]:
            if at <= last and first <= end:
                del known[at]
                self._count_of_parts -= 1
                first, last = min(at, first), max(end, last)
        if self._count_of_parts >= MOST_PARTS:
            message = "a version arrives in too many parts"
            raise ResourceExhausted(message, seen=MOST_PARTS + 1, allowed=MOST_PARTS)
        known[first] = last
        self._count_of_parts += 1
        return sum(end - at for at, end in known.items())

    def _finish_chunk(self, index: int, checksum: int) -> None:
        self._count_of_parts -= len(self._parts.pop(index))
        self._checksums[index] = checksum
        self._missing -= 1
        self.arrived.append(index)
        self.news.set()
        if self.complete:
            self.receive_s = time.monotonic() - self._started_s

    def _check(self, chunk: PushRequest, seen: int, allowed: int) -> None:
        if seen != allowed:
            message = f"{self._name(chunk)} is corrupt"
            raise DataLoss(message, seen=f"{seen:#010x}", allowed=f"{allowed:#010x}")

    def check_content(self) -> None:
        """Raises DataLoss when the chunks differ from the content or delta of the manifest,
        WeightsError when a number of a full push is not finite.
        """
        manifest = self.manifest
        allowed = manifest.delta.stream_hash if self.is_delta else manifest.content_hash
        known = (checksum for checksum in self._checksums if checksum is not None)
        if allowed and (seen := chunks.content_hash(known)) != allowed:
            kind = "delta" if self.is_delta else "content"
            raise DataLoss(f"chunks are not the manifest's {kind}", seen=seen, allowed=allowed)
        if not self.is_delta:
            check_finite(self.tensors())

    def tensors(self) -> list[NamedTensor]:
        """Views of the buffer of a full push, in order."""
        return views(self.manifest, self.buffer)

    def _name(self, chunk: PushRequest) -> str:
        return f"chunk {chunk.chunk_index} of {version_name(self.manifest)}"
