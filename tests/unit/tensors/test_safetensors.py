"""Bytes against the safetensors library as oracle."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load, save

from paceline.errors import DataLoss, InvalidInput
from paceline.tensors import (
    NamedTensor,
    as_numpy,
    decode_safetensors,
    encode_safetensors,
    from_numpy,
    safetensors_header,
)

DTYPES = ["?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda code: arrays.arrays(code, arrays.array_shapes(min_dims=0, min_side=0))
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)


@given(
    st.dictionaries(NAMES, ARRAYS, max_size=4),
    st.dictionaries(NAMES, st.text(max_size=5), max_size=2),
)
def test_library_reads_what_we_write(
    given_arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    data = encode_safetensors(
        [from_numpy(name, array) for name, array in given_arrays.items()], metadata
    )
    loaded = load(data)
    assert loaded.keys() == given_arrays.keys()
    for name, array in given_arrays.items():
        assert (loaded[name].shape, loaded[name].dtype) == (array.shape, array.dtype)
        assert loaded[name].tobytes() == array.tobytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header.get("__metadata__", {}) == metadata


@given(st.dictionaries(NAMES, ARRAYS, max_size=4))
def test_we_read_what_the_library_writes(given_arrays: dict[str, np.ndarray]) -> None:
    data = save(
        {
            name: np.ascontiguousarray(array).reshape(array.shape)
            for name, array in given_arrays.items()
        }
    )
    tensors = decode_safetensors(data)
    assert tensors.keys() == given_arrays.keys()
    for name, array in given_arrays.items():
        assert as_numpy(tensors[name]).tobytes() == array.tobytes()
        assert as_numpy(tensors[name]).shape == array.shape


def test_decoded_tensors_are_views() -> None:
    data = encode_safetensors([NamedTensor("a", "U8", (3,), b"abc")])
    assert decode_safetensors(data)["a"].view.obj is data


@given(st.binary(max_size=80), st.integers(0, 200))
def test_bad_bytes_are_data_loss_and_nothing_else(noise: bytes, cut: int) -> None:
    whole = encode_safetensors(
        [NamedTensor("a", "F32", (2, 2), bytes(16)), NamedTensor("b", "U8", (3,), b"abc")]
    )
    for data in (noise, whole[: cut % len(whole)]):
        with pytest.raises(DataLoss):
            decode_safetensors(data)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}},
        {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 3]}},
        {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}},
        {"a": {"dtype": "X8", "shape": [3], "data_offsets": [0, 3]}},
        {"a": {"dtype": "U8", "shape": [-3], "data_offsets": [0, 3]}},
        {"a": {"dtype": "U8", "shape": [True, 3], "data_offsets": [0, 3]}},
        {"a": {"dtype": "U8", "shape": [2**40, 2**40], "data_offsets": [0, 3]}},
        {
            "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
            "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
        },
        {"a": {"dtype": "U8", "shape": [3] + [1] * 8, "data_offsets": [0, 3]}},
        {"a": {"dtype": "U8", "shape": [0, 2**64], "data_offsets": [0, 0]}},
        {str(number): {} for number in range(100_001)},
        {"a": 3},
        [],
    ],
)
def test_header_that_does_not_fit_its_bytes_is_data_loss(header: object) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(DataLoss):
        decode_safetensors(len(text).to_bytes(8, "little") + text + b"xyz")


def test_names_are_unique_and_the_header_is_aligned() -> None:
    one = NamedTensor("a", "U8", (1,), b"x")
    assert len(safetensors_header([one.layout])) % 8 == 0
    with pytest.raises(InvalidInput, match="same name"):
        encode_safetensors([one, one])
