"""Deltas that no sender should send, and the cost of a delta."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard

from paceline.errors import DataLoss
from paceline.tensors import NamedTensor, from_numpy
from paceline.weights.delta import HEAD, RECORD, apply_delta, encode_delta

ELEMENTS = 1000
FAR = 1 << 60


def versions(changed: list[int], elements: int = ELEMENTS) -> tuple[NamedTensor, NamedTensor]:
    old = np.arange(elements, dtype=np.uint16)
    new = old.copy()
    new[changed] += 1
    return from_numpy("w", old, "BF16"), from_numpy("w", new, "BF16")


def target() -> tuple[bytearray, list[NamedTensor]]:
    old, _ = versions([])
    held = bytearray(old.view)
    return held, [NamedTensor("w", "BF16", (ELEMENTS,), memoryview(held))]


def record(
    gaps: list[int],
    *,
    tensor: int = 0,
    first: int = 0,
    elements: int = ELEMENTS // 2,
    count: int | None = None,
    frame: bytes | None = None,
) -> bytes:
    """A record in the words of the format's description: every value goes up by 1."""
    if frame is None:
        planes = [bytes(gap >> shift & 255 for gap in gaps) for shift in (0, 8, 16, 24)]
        up = bytes([255] * -(-len(gaps) // 8))
        frame = zstandard.ZstdCompressor().compress(b"".join(planes) + up + bytes(2 * len(gaps)))
    changed = len(gaps) if count is None else count
    return RECORD.pack(tensor, first, elements, changed, len(frame)) + frame


def delta(*records: bytes, said: int | None = None) -> bytes:
    head = HEAD.pack(b"PLD2", len(records) if said is None else said)
    return head + b"".join(records)


def test_a_delta_written_by_hand_changes_the_elements_that_it_names() -> None:
    held, tensors = target()
    written = list(apply_delta(delta(record([0, 4]), record([2], first=500)), tensors))
    _, new = versions([0, 5, 502])
    assert held == bytes(new.view)
    assert [bytes(one.view) for one in written] == [
        struct.pack("<2H", 1, 6),
        struct.pack("<H", 503),
    ]


def bomb() -> bytes:
    """Return a few KiB that declare, and decompress to, 256 MiB."""
    zeros = bytes(1 << 20)
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 28)
    return b"".join(compressor.compress(zeros) for _ in range(1 << 8)) + compressor.flush()


def unsized_bomb() -> bytes:
    """Return 64 MiB of zeros, compressed, without a declared size."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join(compressor.compress(bytes(1 << 20)) for _ in range(64)) + compressor.flush()


GOOD = zstandard.ZstdCompressor().compress(bytes([0, 0, 0, 0, 255, 0, 0]))
CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "an empty stream": (lambda: b"", "a delta ends early; seen: 0; allowed: >= 8"),
    "another format": (
        lambda: b"PLD9" + delta()[4:],
        "head of a delta has another form; seen: .*PLD9",
    ),
    "the format before": (
        lambda: b"PLD1" + delta()[4:],
        "head of a delta has another form; seen: .*PLD1",
    ),
    "a piece of nothing": (
        lambda: delta(record([0], elements=0)),
        r"elements of piece 0 of w; seen: \(1, 0\)",
    ),
    "a piece beyond its tensor": (
        lambda: delta(record([0], first=600, elements=401)),
        r"piece 600 of w; seen: \(1, 401\); allowed: .* up to 400",
    ),
    "fewer records than it says": (lambda: delta(record([1]), said=2), "ends early"),
    "more than it says": (lambda: delta(record([1]), said=0), "head of a delta has another form"),
    "a section that is cut": (lambda: delta(record([1])) + b"PLD2", "ends early; seen: 4"),
    "a tensor that is not there": (
        lambda: delta(record([1], tensor=1)),
        "tensor of a delta is out of range; seen: 1; allowed: < 1",
    ),
    "a piece that is not there": (
        lambda: delta(record([1], first=1 << 60)),
        "elements of piece 1152921504606846976 of w",
    ),
    "more elements than the piece has": (
        lambda: delta(record([0], count=501)),
        r"piece 0 of w; seen: \(501, 500\)",
    ),
    "no element": (lambda: delta(record([0], count=0)), r"seen: \(0, 500\)"),
    "an index out of range": (
        lambda: delta(record([3, 496])),
        "index in w is out of range; seen: 500; allowed: < 500",
    ),
    "an index far out of range": (
        lambda: delta(record([2**32 - 1] * 3)),
        "index in w is out of range; seen: 12884901887",
    ),
    "a truncated frame": (
        lambda: delta(record([0], frame=GOOD[:-3])),
        "frame of w cannot be read",
    ),
    "a frame beyond the stream": (
        lambda: delta(RECORD.pack(0, 0, 500, 1, 100) + GOOD),
        f"ends early; seen: {len(GOOD)}; allowed: 100",
    ),
    "no frame": (lambda: delta(record([0], frame=b"not zstd at all")), "cannot be read"),
    "two frames": (lambda: delta(record([0], frame=GOOD + GOOD)), "cannot be read"),
    "a frame of another count": (
        lambda: delta(record([0, 0], frame=GOOD)),
        "frame of w has another size; seen: 7; allowed: 13",
    ),
    "a bomb": (
        lambda: delta(record([0], frame=bomb())),
        "frame of w has another size; seen: 268435456; allowed: 7",
    ),
    "a bomb that says nothing": (
        lambda: delta(record([0], frame=unsized_bomb())),
        "frame of w has another size; seen: 18446744073709551615; allowed: 7",
    ),
}


@pytest.mark.parametrize(("stream", "words"), CASES.values(), ids=CASES.keys())
def test_what_is_no_delta_of_these_tensors_is_refused_with_what_was_seen(
    stream: Callable[[], bytes], words: str
) -> None:
    _, tensors = target()
    with pytest.raises(DataLoss, match=words) as refusal:
        list(apply_delta(stream(), tensors))
    assert refusal.value.reason == "DELTA_DAMAGED"


@pytest.mark.parametrize("stream", [bomb(), unsized_bomb()], ids=["sized", "unsized"])
def test_a_bomb_takes_no_memory(stream: bytes) -> None:
    _, tensors = target()
    tracemalloc.start()
    try:
        with pytest.raises(DataLoss):
            list(apply_delta(delta(record([0], frame=stream)), tensors))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_says_less_than_it_holds_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(200)))
    assert frame[5] == 200  # a single segment: its size follows the descriptor
    frame[5] = 7
    _, tensors = target()
    with pytest.raises(DataLoss, match="frame of w cannot be read"):
        list(apply_delta(delta(record([0], frame=bytes(frame))), tensors))


def test_encoding_ends_when_it_is_longer_than_the_limit() -> None:
    rng = np.random.default_rng(0)
    old, new = (
        from_numpy("w", rng.integers(0, 1 << 16, 100_000, dtype=np.uint16), "BF16") for _ in "ab"
    )
    assert encode_delta([old], [new], limit=10_000, piece=1000) is None
    whole = encode_delta([old], [new], limit=FAR, piece=1000)
    assert whole is not None
    assert len(whole.stream) > 150_000


def test_nothing_changed_is_a_head() -> None:
    old, new = versions([])
    encoded = encode_delta([old], [new], limit=FAR)
    assert encoded is not None
    assert (len(encoded.stream), encoded.changed) == (HEAD.size, 0)


def test_a_few_changed_values_cost_the_same_in_a_tensor_sixteen_times_as_large() -> None:
    sizes = []
    for elements in (1 << 20, 1 << 24):
        chosen = np.random.default_rng(3).choice(elements, 1000, replace=False)
        encoded = encode_delta(*([one] for one in versions(list(chosen), elements)), limit=FAR)
        assert encoded is not None
        assert encoded.changed == 1000
        sizes.append(len(encoded.stream))
    assert sizes[1] < 1.5 * sizes[0]


def test_one_value_in_a_hundred_that_moves_by_one_takes_ten_bits() -> None:
    elements = 1 << 20
    rng = np.random.default_rng(1)
    old = rng.integers(0x3000, 0x4000, elements, dtype=np.uint16)
    new = old + rng.choice([-1, 0, 1], elements, p=[0.005, 0.99, 0.005]).astype(np.uint16)
    tensors = [from_numpy("w", one, "BF16") for one in (old, new)]
    encoded = encode_delta([tensors[0]], [tensors[1]], limit=FAR)
    assert encoded is not None
    # The entropy: 8.08 bits of a geometric gap of mean 100, and 1 of the direction.
    assert 9.08 <= 8 * len(encoded.stream) / encoded.changed <= 10


def test_a_version_with_most_elements_changed_is_left_to_a_full_push_before_any_is_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elements = 1 << 16
    changed = list(range(0, elements, 2))
    tensors = versions(changed, elements)
    small = encode_delta(*([one] for one in tensors), limit=FAR)
    assert small is not None
    assert small.changed == elements // 2
    monkeypatch.setattr("paceline.weights.delta._encoded", None)
    assert encode_delta(*([one] for one in tensors), limit=2 * elements // 16) is None
