"""A delta between two versions turns any old bytes into the new bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataLoss
from paceline.tensors import NUMPY_CODES, NamedTensor, as_numpy
from paceline.weights.delta import apply_delta, encode_delta

SIZE = {dtype: np.dtype(code).itemsize for dtype, code in NUMPY_CODES.items()}
NAN = {"BF16": b"\xc1\x7f", "F16": b"\x01\xfe", "F32": b"\x01\x00\xa0\xff", "F8_E4M3": b"\x7f"}
"""Bits of a NaN with a payload."""
PIECES = st.sampled_from([7, 64, 1 << 22])
FAR = 1 << 60


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[NamedTensor], list[NamedTensor]]:
    """Two versions: nothing, some elements or everything changed, in tensors of any type."""
    old, new = [], []
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(NUMPY_CODES)))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        count, itemsize = draw(st.sampled_from([0, 1, 7, 64, 65, 200])), SIZE[dtype]
        before = rng.bytes(count * itemsize)
        rows = np.frombuffer(before, np.uint8).reshape(count, itemsize).copy()
        changed = rng.random(count) < draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
        rows[changed] = rng.integers(0, 256, (int(changed.sum()), itemsize), dtype=np.uint8)
        if dtype in NAN and count:
            rows[draw(st.integers(0, count - 1))] = np.frombuffer(NAN[dtype], np.uint8)
        old.append(NamedTensor(f"t{number}", dtype, (count,), before))
        new.append(NamedTensor(f"t{number}", dtype, (count,), rows.tobytes()))
    return old, new


def copies(tensors: list[NamedTensor]) -> tuple[list[bytearray], list[NamedTensor]]:
    held = [bytearray(one.view) for one in tensors]
    return held, [
        NamedTensor(one.name, one.dtype, one.shape, memoryview(data))
        for one, data in zip(tensors, held, strict=True)
    ]


@given(pairs(), PIECES)
def test_a_delta_applied_to_the_old_version_is_the_new_one(
    versions: tuple[list[NamedTensor], list[NamedTensor]], piece: int
) -> None:
    old, new = versions
    encoded = encode_delta(old, new, limit=FAR, piece=piece)
    assert encoded is not None
    assert encode_delta(old, new, limit=FAR, piece=piece) == encoded, "a push could not resume"
    held, tensors = copies(old)
    written = sum(one.shape[0] for one in apply_delta(encoded.stream, tensors))
    assert held == [bytearray(one.view) for one in new]
    differ = sum(
        bytes(a.view[at : at + SIZE[a.dtype]]) != bytes(b.view[at : at + SIZE[a.dtype]])
        for a, b in zip(old, new, strict=True)
        for at in range(0, len(a.view), SIZE[a.dtype])
    )
    assert written == encoded.changed == differ
    assert encoded.elements == sum(as_numpy(one).size for one in new)


@given(pairs(), PIECES, st.data())
def test_a_cut_or_spoiled_delta_is_data_loss_or_applies_within_its_tensors(
    versions: tuple[list[NamedTensor], list[NamedTensor]], piece: int, data: st.DataObject
) -> None:
    old, new = versions
    encoded = encode_delta(old, new, limit=FAR, piece=piece)
    assert encoded is not None
    spoiled = bytearray(encoded.stream[: data.draw(st.integers(0, len(encoded.stream)))])
    if spoiled:
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] ^= data.draw(st.integers(0, 255))
    whole = bytes(spoiled) == encoded.stream
    held, tensors = copies(old)
    refusal: list[DataLoss] = []
    try:
        list(apply_delta(bytes(spoiled), tensors))
    except DataLoss as error:
        refusal.append(error)
    assert all(one.reason == "DELTA_DAMAGED" and one.seen is not None for one in refusal)
    assert not (whole and refusal)
    assert [len(one) for one in held] == [len(one.view) for one in old]
