"""One version during its arrival: its buffer and its received chunks.

The next destination of the bytes is decided elsewhere (spool, servicer).
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from paceline.errors import DataLoss, InvalidInput, ResourceExhausted
from paceline.tensors import NamedTensor
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_SPARSE_DELTA, FileRange, Manifest, TakeRequest
from paceline.weights.chunks import (
    allocate,
    chunk_count,
    chunk_span,
    content_hash,
    in_threads,
    stream_bytes,
)
from paceline.weights.handover import HandoverDirectory, check_inside, read_range
from paceline.weights.manifest import check_finite, check_manifest, target_name, views
from paceline.weights.wire import PushChunk

MOST_SPANS = 1 << 18
"""Largest number of spans of one version in incomplete chunks. Many senders together leave far
fewer gaps.
"""
Span = tuple[int, int]
"""First byte in the stream, and the first byte after the span."""


class Assembly:
    """A buffer of the stream's bytes, and the checksum of each received chunk, whole or in parts.
    Writes are idempotent.
    """

    def __init__(
        self, manifest: Manifest, allocated: Callable[[int], memoryview] = allocate
    ) -> None:
        """`allocated`: returns a buffer of that many zeroed bytes. Raises InvalidInput for an
        invalid manifest, ResourceExhausted.
        """
        check_manifest(manifest, max_bytes=manifest.total_bytes)
        self.manifest = manifest
        self.buffer = allocated(stream_bytes(manifest))
        self._checksums: list[int | None] = [None] * chunk_count(manifest)
        self._spans: dict[int, list[Span]] = {}  # received spans of incomplete chunks
        self._count_of_spans = 0
        self._missing = len(self._checksums)
        self.arrived: list[int] = []  # complete chunks, in the order of their completion
        self.news = asyncio.Event()  # set when a chunk is complete
        self.started_s: float | None = None
        self.finished_s: float | None = None

    @property
    def complete(self) -> bool:
        """Whether all chunks are received and checked."""
        return not self._missing

    @property
    def receive_s(self) -> float:
        """Seconds from the first chunk to the last; 0 until complete."""
        return (
            self.finished_s - self.started_s
            if self.started_s is not None and self.finished_s is not None
            else 0.0
        )

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

    def check(self, chunk: PushChunk) -> None:
        """Raises DataLoss when the checksum of a chunk's bytes is wrong."""
        checksum = zlib.crc32(chunk.data)
        if checksum != chunk.crc32:
            raise self._corrupt(chunk, checksum, chunk.crc32)

    def place(self, chunk: PushChunk, *, checked: bool = False) -> None:
        """Checks a chunk or part, unless it is `checked`, and copies it into its place. Bytes that
        are already there are compared with it.

        Raises DataLoss on a wrong checksum, InvalidInput on a wrong index or length,
        ResourceExhausted on too many parts.
        """
        index = chunk.chunk_index
        start, end = chunk_span(self.manifest, index)
        first, last = start + chunk.offset, start + chunk.offset + len(chunk.data)
        if not first < last <= end:
            raise InvalidInput(
                f"{self._name(chunk)} has a wrong length",
                seen=len(chunk.data),
                allowed=f"1 to {end - first}" if chunk.offset else end - start,
            )
        if self.started_s is None:
            self.started_s = time.monotonic()
        if not checked:
            self.check(chunk)
        complete = self._checksums[index] is not None
        here = [(start, end)] if complete else self._spans.get(index, [])
        self._check_same(chunk, first, here)
        spans = _joined([*here, (first, last)])
        if spans == here:
            return
        self._note(index, spans, len(spans) - len(here), whole=spans == [(start, end)])
        self.buffer[first:last] = chunk.data
        if index in self._spans:
            return
        whole = (first, last) == (start, end)
        self._checksums[index] = chunk.crc32 if whole else zlib.crc32(self.buffer[start:end])
        self._missing -= 1
        self.arrived.append(index)
        self.news.set()
        if self.complete:
            self.finished_s = time.monotonic()

    def _check_same(self, chunk: PushChunk, first: int, here: Sequence[Span]) -> None:
        """Raises DataLoss if the chunk differs from bytes that are already there."""
        for begin, end in here:
            begin, end = max(begin, first), min(end, first + len(chunk.data))
            if begin < end:
                known = zlib.crc32(self.buffer[begin:end])
                seen = zlib.crc32(chunk.data[begin - first : end - first])
                if seen != known:
                    raise self._corrupt(chunk, seen, known)

    def _note(self, index: int, spans: list[Span], more: int, *, whole: bool) -> None:
        """Records the received spans of a chunk; a whole chunk needs none."""
        if whole:
            self._count_of_spans -= len(self._spans.pop(index, ()))
            return
        if self._count_of_spans + more > MOST_SPANS:
            raise ResourceExhausted(
                "parts of chunks leave too many gaps",
                seen=self._count_of_spans + more,
                allowed=MOST_SPANS,
            )
        self._spans[index] = spans
        self._count_of_spans += more

    def _corrupt(self, chunk: PushChunk, seen: int, allowed: int) -> DataLoss:
        return DataLoss(
            f"{self._name(chunk)} is corrupt", seen=f"{seen:#010x}", allowed=f"{allowed:#010x}"
        )

    def check_content(self) -> None:
        """Raises DataLoss when the chunks differ from the content or delta of the manifest,
        WeightsError when a number of a full push is not finite.
        """
        manifest = self.manifest
        allowed = manifest.delta.stream_hash if self.is_delta else manifest.content_hash
        if allowed and (seen := content_hash(self._known())) != allowed:
            what = "delta" if self.is_delta else "content"
            raise DataLoss(f"chunks are not the manifest's {what}", seen=seen, allowed=allowed)
        if not self.is_delta:
            check_finite(self.tensors())

    def tensors(self) -> list[NamedTensor]:
        """Views of the buffer of a full push, in order."""
        return views(self.manifest, self.buffer)

    def _known(self) -> Iterator[int]:
        return (checksum for checksum in self._checksums if checksum is not None)

    def _name(self, chunk: PushChunk) -> str:
        return (
            f"chunk {chunk.chunk_index} of {target_name(self.manifest.target)} version "
            f"{self.manifest.version}"
        )


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The spans merged, in order."""
    joined: list[Span] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined


_AT_ONCE = 8
"""Ranges in memory before they are placed."""


async def take_ranges(
    assembly_of: Callable[[], Assembly], request: TakeRequest, directory: HandoverDirectory
) -> int:
    """Checks and places ranges; returns their number of bytes. `assembly_of` raises if the
    announced version has changed.

    Raises InvalidInput with reason HANDOVER for a refused file, and the errors of Assembly.place.
    """
    received = 0
    with directory.opened(request.file) as handle:
        check_inside(handle, max((one.position + one.nbytes for one in request.ranges), default=0))
        for at in range(0, len(request.ranges), _AT_ONCE):
            ranges = request.ranges[at : at + _AT_ONCE]
            for chunk in await asyncio.to_thread(_read, assembly_of(), request, handle, ranges):
                assembly_of().place(chunk, checked=True)
                received += len(chunk.data)
    return received


def _read(
    assembly: Assembly, request: TakeRequest, handle: int, ranges: Sequence[FileRange]
) -> list[PushChunk]:
    """The ranges of the file, checked, in several threads."""
    most = assembly.manifest.chunk_bytes

    def read(one: FileRange) -> PushChunk:
        if one.nbytes > most:
            raise InvalidInput("a range is longer than a chunk", seen=one.nbytes, allowed=most)
        data = read_range(handle, one.position, one.nbytes)
        index, offset = divmod(one.start, most)
        chunk = PushChunk(request.target, request.version, index, one.crc32, data, None, offset)
        assembly.check(chunk)
        return chunk

    return list(in_threads(read, ranges))
