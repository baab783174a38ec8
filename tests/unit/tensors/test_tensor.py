"""Names, sizes and views of tensors."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save

from paceline.errors import InvalidInput
from paceline.tensors import (
    NamedTensor,
    as_numpy,
    decode_safetensors,
    from_numpy,
    head_hash,
    is_finite,
)


def test_bfloat16_is_shown_as_its_bits() -> None:
    tensor = from_numpy("w", np.array([[0x3F80, 0xBF80]], dtype=np.uint16), "BF16")
    assert (tensor.dtype, tensor.shape, as_numpy(tensor).tolist()) == (
        "BF16",
        (1, 2),
        [[0x3F80, 0xBF80]],
    )


def test_contiguous_array_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(as_numpy(from_numpy("w", array)), array)


def test_strided_array_is_copied_in_row_order() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert as_numpy(from_numpy("w", array.T)).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_bytes_that_do_not_fill_the_shape_are_refused() -> None:
    with pytest.raises(InvalidInput, match="do not fill") as refusal:
        NamedTensor("w", "F32", (2,), b"1234567")
    assert (refusal.value.seen, refusal.value.allowed) == ("7", "8")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("", "U8", (1,)),
        ("__metadata__", "U8", (1,)),
        ("w", "X", (1,)),
        ("w", "U8", (1,) * 9),
        ("w", "U8", (2**32, 2**32)),
    ],
)
def test_odd_names_and_dtypes_are_refused(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput):
        NamedTensor(name, dtype, shape, b"x")


def test_dtypes_without_a_name_are_refused() -> None:
    for code in (">f4", "c8"):
        with pytest.raises(InvalidInput):
            from_numpy("w", np.zeros(2, dtype=code))


def test_head_is_named_by_the_start_of_its_sha256() -> None:
    assert head_hash(b"abc") == hashlib.sha256(b"abc").hexdigest()[:16]


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"],
)
@pytest.mark.parametrize("value", [0.0, -448.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 70_000])
def test_a_tensor_is_finite_where_torch_finds_no_nan_and_no_infinity(
    dtype: str, value: float, at: int
) -> None:
    numbers = torch.ones(70_001)
    numbers[at] = value
    stored = numbers.to(getattr(torch, dtype))
    (tensor,) = decode_safetensors(save({"a": stored})).values()
    assert is_finite(tensor) == bool(stored.float().isfinite().all())


def test_whole_numbers_and_no_numbers_are_finite() -> None:
    assert is_finite(from_numpy("a", np.full(9, -1, dtype=np.int32)))
    assert is_finite(from_numpy("a", np.zeros((0, 4), dtype=np.float32)))
