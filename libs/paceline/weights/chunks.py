"""Chunks of a version's stream: their places and checksums, and memory and threads for them.

Appending n bytes multiplies the CRC, a polynomial over GF(2), by x^(8n) modulo the CRC-32
polynomial.
"""

import hashlib
import mmap
import os
import tempfile
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import psutil

from paceline.errors import InvalidInput, ResourceExhausted
from paceline.processor import HUGE_PAGE, KEPT_SHARE, memory_bytes
from paceline.telemetry import get_logger
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_SPARSE_DELTA, Manifest
from paceline.whole_files import writing

_log = get_logger(__name__)


class CheckedRange(NamedTuple):
    """Bytes of a stream within one chunk; of a full push also within one tensor."""

    start: int  # first byte in the stream
    data: memoryview
    crc32: int


def checked_range(start: int, data: memoryview) -> CheckedRange:
    """The range with its CRC-32."""
    return CheckedRange(start, data, zlib.crc32(data))


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
        message = "chunk index is out of range"
        raise InvalidInput(message, seen=index, allowed=f"0 to {chunk_count(manifest) - 1}")
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, stream_bytes(manifest))


def content_hash(checksums: Iterable[int]) -> str:
    """Name of a content or a stream: sha256 over the chunks' CRC-32s, each a little-endian u32, in
    hex.
    """
    return hashlib.sha256(b"".join(crc.to_bytes(4, "little") for crc in checksums)).hexdigest()


_POLYNOMIAL = 0xEDB88320  # reflected: the highest bit is x^0
_ONE = 1 << 31


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 (zlib's) of two adjacent ranges, the second with `second_bytes` bytes."""
    return _product(_power(second_bytes), first) ^ second


def _product(one: int, other: int) -> int:
    result = 0
    while one:
        if one & _ONE:
            result ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial."""
    result, square = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _product(result, square)
        square = _product(square, square)
        nbytes >>= 1
    return result


A = TypeVar("A")
B = TypeVar("B")

MOST_THREADS = 4
"""Threads of one push. Beyond a few, memory is the limit, and engines may need the other cores."""


def in_threads(work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Results in the order of the items, with at most two items per thread in progress. Raises the
    errors of `work`.
    """
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    under_way: deque[Future[B]] = deque()
    with ThreadPoolExecutor(threads, "weights") as pool:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) >= 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


_GROUP = Path("/sys/fs/cgroup")


_spare: deque[mmap.mmap] = deque(maxlen=2)
"""Memory of dropped versions, for the next ones: a system takes up to 2 s for a fresh GB."""


def allocate(nbytes: int) -> memoryview:
    """Bytes of any value in a mapping of their own, which is kept for later calls when they are
    dropped, unless it is a large share of the memory. Uses huge pages if offered.

    Raises ResourceExhausted.
    """
    memory = _reused(nbytes)
    if memory is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            memory = mmap.mmap(-1, nbytes, flags=flags)
        except OSError as error:
            raise ResourceExhausted("no memory for a version", seen=nbytes) from error
        if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= HUGE_PAGE:
            memory.madvise(mmap.MADV_HUGEPAGE)
    if not HUGE_PAGE <= nbytes <= memory_bytes() // KEPT_SHARE:
        return memoryview(memory)
    array = np.frombuffer(memory, dtype=np.uint8)  # lives as long as any view of it
    weakref.finalize(array, _spare.append, memory).atexit = False
    return array.data


def _reused(nbytes: int) -> mmap.mmap | None:
    for _ in range(len(_spare)):
        with suppress(IndexError):  # another thread took it
            memory = _spare.popleft()
            if len(memory) == nbytes:
                return memory
            _spare.append(memory)
    return None


def mapped_file(nbytes: int, directory: Path) -> memoryview:
    """Zeroed bytes of an unnamed file in the directory. The system writes out pages that find no
    room in memory. The file disappears when the bytes are dropped.

    Raises ResourceExhausted on creation, not on a later write.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return memoryview(mmap.mmap(file.fileno(), nbytes))


def room_for(nbytes: int, directory: Path) -> memoryview:
    """Bytes of any value for a version: in memory, or in an unnamed file of the directory if they
    would take more than half of the available memory. Raises ResourceExhausted.
    """
    if nbytes <= available_bytes() // 2:
        return allocate(nbytes)
    _spare.clear()
    _log.warning("version_assembled_on_disk", bytes=nbytes)
    return mapped_file(nbytes, directory)


def available_bytes() -> int:
    """Bytes that the system could provide without swapping, within this container's limit if there
    is one.
    """
    found = psutil.virtual_memory().available
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit, or "max"
        return found
    return max(0, min(found, limit - used + int(stat.get("inactive_file", 0))))
