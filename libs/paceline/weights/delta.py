"""Encodes the changes between two versions of the same tensors, and applies them, bit for bit.

Stream: one section per sender, each for the sender's share of the tensors. A section is a head,
then a record for each piece with a changed element. A piece is a run of adjacent elements of a
tensor. A record's zstd frame holds for each changed element: the gap (number of elements between it
and the previous changed one; 4 bytes), whether its bits as a number increased (1 bit), and the
amount minus 1 (the element's size, modulo it). Gaps and amounts are stored as byte planes, lowest
byte first. A training step moves most changed numbers by one unit in the last place, so all planes
except gap and direction are nearly zero. Integers are little-endian.

More than 99 % of bf16 weights are unchanged in an RL step according to the PULSE paper
(arXiv:2602.03839), which sends index and value of each changed weight.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from paceline.errors import DataLoss, NotFound, WeightsError
from paceline.tensors import NUMPY_CODES, NamedTensor
from paceline.v1.weights_pb2 import Manifest
from paceline.weights import chunks, manifest
from paceline.weights.spool import Spool

HEAD = struct.Struct("<4sI")
"""Magic, records."""
RECORD = struct.Struct("<IQIII")
"""Index of the tensor, first element of the piece in the tensor, elements of the piece, changed
elements, bytes of the frame.
"""
MAGIC = b"PLD2"
DELTA_DAMAGED = "DELTA_DAMAGED"
"""Error reason of a delta that cannot be applied, or that yields another version."""
SAMPLE_STEP, SAMPLED = 257, 64
"""Distance of sampled elements, and fewest samples of a tensor."""
PIECE_ELEMENTS = 1 << 22
"""Elements that one thread compares and compresses at a time. It bounds a receiver's memory per
record (12 bytes an element at most).
"""
_GAP_BYTES = 4
_LEVEL = 1  # the non-zero planes are close to random, so more effort gains nothing
_BLOCK = 1 << 16  # words of 8 bytes compared at a time; both sides stay in the cache

Words = npt.NDArray[Any]
"""Elements of a tensor as unsigned integers of their size, flat."""


class EncodedDelta(NamedTuple):
    """A section of a delta, and its number of changed elements."""

    stream: bytes
    changed: int  # changed elements
    elements: int  # elements of the whole share


class _Piece(NamedTuple):
    tensor: int
    first: int
    old: Words
    new: Words


class _Record(NamedTuple):
    tensor: NamedTensor
    words: Words  # of the piece, in place
    changed: int  # elements
    frame: memoryview


def encode_delta(
    old: Sequence[NamedTensor],
    new: Sequence[NamedTensor],
    *,
    limit: int,
    piece: int = PIECE_ELEMENTS,
    places: Sequence[tuple[int, int]] | None = None,
) -> EncodedDelta | None:
    """The delta from `old` to `new`, tensors of the same layouts in the same order. Returns None if
    it takes more than `limit` bytes; a sample of the elements shows this early. `places`: for each
    tensor the index of the whole tensor that it is a part of, and its first element there; None if
    all tensors are whole.
    """
    places = [(index, 0) for index in range(len(new))] if places is None else places
    if _sampled_changes(old, new) > limit:  # a changed element takes a byte or more
        return None
    records: list[bytes] = []
    size, changed = HEAD.size, 0
    for count, record in chunks.in_threads(_encoded, _pieces(old, new, places, piece)):
        if count:
            records.append(record)
            size, changed = size + len(record), changed + count
        if size > limit:
            return None
    head = HEAD.pack(MAGIC, len(records))
    elements = sum(_words(one).size for one in new)
    return EncodedDelta(b"".join((head, *records)), changed, elements)


def apply_delta(
    stream: memoryview | bytes, tensors: Sequence[NamedTensor]
) -> Iterator[NamedTensor]:
    """Turns `tensors`, writable and holding the base, into the next version, as far as the result
    is iterated. Yields the written numbers as 1-D tensors.

    Raises DataLoss for a stream that is no delta of such tensors. Until then, only `tensors` and
    memory for a few pieces have been used.
    """
    return chunks.in_threads(_applied, _records(memoryview(stream), tensors))


def _sampled_changes(old: Sequence[NamedTensor], new: Sequence[NamedTensor]) -> float:
    """Estimated number of changed elements of the large tensors."""
    changes = 0.0
    for before, after in zip(old, new, strict=True):
        was, now = _words(before), _words(after)
        if was.size > SAMPLED * SAMPLE_STEP:
            changes += was.size * float(np.mean(was[::SAMPLE_STEP] != now[::SAMPLE_STEP]))
    return changes


def _words(tensor: NamedTensor) -> Words:
    itemsize = np.dtype(NUMPY_CODES[tensor.dtype]).itemsize
    return np.frombuffer(tensor.view, dtype=f"<u{itemsize}")


def _pieces(
    old: Sequence[NamedTensor],
    new: Sequence[NamedTensor],
    places: Sequence[tuple[int, int]],
    piece: int,
) -> Iterator[_Piece]:
    for before, after, (tensor, first) in zip(old, new, places, strict=True):
        was, now = _words(before), _words(after)
        for start in range(0, was.size, piece):
            span = slice(start, start + piece)
            yield _Piece(tensor, first + start, was[span], now[span])


def _encoded(piece: _Piece) -> tuple[int, bytes]:
    """Number of changed elements of a piece, and its record."""
    at, moved = _changed(piece.old, piece.new)
    if not at.size:
        return 0, b""
    gaps = at.astype(np.uint32)
    gaps[1:] -= gaps[:-1].copy() + 1
    bits = 8 * moved.itemsize
    signs = (moved.view(f"<i{moved.itemsize}") >> (bits - 1)).view(moved.dtype)
    zigzag = ((moved << 1) ^ signs) - 1  # no entry moves by 0
    planes = [*_planes(gaps, _GAP_BYTES), np.packbits(zigzag & 1), *_planes(zigzag >> 1)]
    frame = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(
        np.concatenate(planes).data
    )
    head = RECORD.pack(piece.tensor, piece.first, piece.new.size, at.size, len(frame))
    return at.size, head + frame


def _changed(old: Words, new: Words) -> tuple[npt.NDArray[np.intp], Words]:
    """Indices of changed elements, ascending, and new bits minus old bits there."""
    shift = 3 - (old.dtype.itemsize.bit_length() - 1)  # a word of 8 bytes has 2 ** shift elements
    whole = old.size >> shift << shift
    wide_old, wide_new = old[:whole].view("<u8"), new[:whole].view("<u8")
    flags = np.empty(min(_BLOCK, wide_old.size), dtype=np.bool_)
    places, olds, news = [], [], []
    for start in range(0, wide_old.size, _BLOCK):
        was, now = wide_old[start : start + _BLOCK], wide_new[start : start + _BLOCK]
        words = np.flatnonzero(np.not_equal(was, now, out=flags[: was.size]))
        if words.size:
            olds.append(was.take(words))  # while the words are in the cache
            news.append(now.take(words))
            words += start
            places.append(words)
    tail = np.flatnonzero(old[whole:] != new[whole:]) + whole
    if not places:
        return tail, new[tail] - old[tail]
    before, after = (np.concatenate(words).view(old.dtype) for words in (olds, news))
    inner = np.flatnonzero(before != after)
    at = (np.concatenate(places).take(inner >> shift) << shift) + (inner & (1 << shift) - 1)
    moved = after.take(inner) - before.take(inner)
    return np.concatenate([at, tail]), np.concatenate([moved, new[tail] - old[tail]])


def _planes(numbers: npt.NDArray[Any], count: int = 0) -> Iterator[npt.NDArray[np.uint8]]:
    """The lowest byte of each number, then the next one; `count` planes, or all."""
    for plane in range(count or numbers.itemsize):
        yield (numbers >> 8 * plane).astype(np.uint8)


def _numbers(planes: npt.NDArray[np.uint8], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The numbers with these rows as bytes, lowest first."""
    numbers: npt.NDArray[Any] = planes[0].astype(dtype)
    for number, plane in enumerate(planes[1:], start=1):
        if plane.any():
            numbers |= plane.astype(dtype) << 8 * number
    return numbers


def _records(stream: memoryview, tensors: Sequence[NamedTensor]) -> Iterator[_Record]:
    """The records of all sections, each checked to be within its piece, with frames undecoded."""
    position = 0
    while position < len(stream) or not position:
        magic, records = _unpacked(HEAD, stream, position)
        if magic != MAGIC:
            raise _refused("head of a delta has another form", magic, MAGIC)
        position += HEAD.size
        for _ in range(records):
            record, position = _record(stream, position, tensors)
            yield record


def _unpacked(form: struct.Struct, stream: memoryview, position: int) -> tuple[Any, ...]:
    if len(stream) - position < form.size:
        raise _refused("a delta ends early", len(stream) - position, f">= {form.size}")
    return form.unpack_from(stream, position)


def _record(
    stream: memoryview, position: int, tensors: Sequence[NamedTensor]
) -> tuple[_Record, int]:
    """The record at a position, and the position after it."""
    tensor, first, elements, count, nbytes = _unpacked(RECORD, stream, position)
    if tensor >= len(tensors):
        raise _refused("tensor of a delta is out of range", tensor, f"< {len(tensors)}")
    whole = _words(tensors[tensor])
    most = min(PIECE_ELEMENTS, whole.size - first)
    if not 1 <= count <= elements <= most:
        about = f"piece {first} of {tensors[tensor].name}"
        allowed = f"changed elements >= 1, elements up to {most}"
        raise _refused(f"changed elements and elements of {about}", (count, elements), allowed)
    position += RECORD.size
    frame = stream[position : position + nbytes]
    if len(frame) != nbytes:
        raise _refused("a delta ends early", len(frame), nbytes)
    record = _Record(tensors[tensor], whole[first : first + elements], count, frame)
    return record, position + nbytes


def _applied(record: _Record) -> NamedTensor:
    """Writes the changed elements of a piece and returns them."""
    words, count, name = record.words, record.changed, record.tensor.name
    signs = -(-count // 8)
    raw = _decompressed(record.frame, count * (_GAP_BYTES + words.itemsize) + signs, name)
    planes = np.frombuffer(raw, dtype=np.uint8)
    at = _numbers(planes[: _GAP_BYTES * count].reshape(-1, count), np.int64)
    at = np.cumsum(at, out=at)
    at += np.arange(count)
    if at[-1] >= words.size:
        raise _refused(f"index in {name} is out of range", at[-1], f"< {words.size} of the piece")
    size = _numbers(planes[_GAP_BYTES * count + signs :].reshape(-1, count), words.dtype)
    up = np.unpackbits(planes[_GAP_BYTES * count :][:signs], count=count).astype(words.dtype)
    values = words.take(at) + ((size ^ (up - 1)) + up)  # size + 1, or its negative: ~size
    words[at] = values
    return NamedTensor(name, record.tensor.dtype, (count,), values.view(np.uint8).data)


def _decompressed(frame: memoryview, nbytes: int, name: str) -> bytes:
    """The frame's content. Its length must be `nbytes`, so a frame cannot make the receiver
    allocate more.
    """
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size != nbytes:
            raise _refused(f"frame of {name} has another size", size, nbytes)
        raw = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _refused(f"frame of {name} cannot be read", error, "a zstd frame") from error
    return raw


def _refused(fault: str, seen: object, allowed: object) -> DataLoss:
    return DataLoss(fault, reason=DELTA_DAMAGED, seen=seen, allowed=allowed)


DELTA_BASE = "DELTA_BASE"
"""Error reason of a delta without its base in the spool."""


def check_base(spool: Spool, announced: Manifest) -> None:
    """Raises WeightsError with reason DELTA_BASE unless the spool has the base of a delta, with the
    content and tensors that the delta requires.
    """
    try:
        held = spool.manifest(announced.target, announced.base_version)
    except DataLoss as error:
        raise _unusable(announced, str(error)) from error
    if held is None:
        raise _unusable(announced, "absent")
    if held.content_hash != announced.delta.base_hash:
        raise _unusable(announced, f"content {held.content_hash[:16]}")
    if manifest.layouts(held) != manifest.layouts(announced):
        raise _unusable(announced, "other tensors")


def rebuilt(spool: Spool, announced: Manifest, stream: memoryview) -> memoryview:
    """The content of the version behind a delta, in memory of its own, checked.

    Raises WeightsError with reason DELTA_BASE when the base is absent or damaged; DataLoss with
    reason DELTA_DAMAGED when the delta cannot be applied or yields another content than the
    manifest's; WeightsError when a number is not finite.
    """
    check_base(spool, announced)
    content = spool.room_for(announced.total_bytes)
    target, base = announced.target, announced.base_version
    try:
        spool.read_content(target, base, content)
        manifest.check_finite(apply_delta(stream, manifest.views(announced, content)))
        seen = manifest.hash_of(announced, content)
        if seen != announced.content_hash:
            about = f"delta to {manifest.version_name(announced)} gives other content"
            raise _refused(about, seen, announced.content_hash)
    except (DataLoss, NotFound) as error:
        try:
            spool.check(target, base)  # records a damaged base
        except DataLoss as damage:
            raise _unusable(announced, str(damage)) from damage
        raise error
    return content


def _unusable(announced: Manifest, fault: str) -> WeightsError:
    return WeightsError(
        f"base of a delta to {manifest.version_name(announced)} cannot be used",
        reason=DELTA_BASE,
        seen=fault,
        allowed=f"version {announced.base_version} with content {announced.delta.base_hash[:16]}",
    )
