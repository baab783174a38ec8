"""One named tensor as a view of bytes.

Owns dtype names, sizes and numpy views; not the file format.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidInput

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of one element, by safetensors dtype name."""

# numpy has no bfloat16 and no float8: their bits are shown as unsigned integers.
NUMPY_CODES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_NAMES = {
    np.dtype(code): name for name, code in NUMPY_CODES.items() if not name.startswith(("BF", "F8"))
}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Name, dtype and shape, without the bytes."""

    name: str
    dtype: str  # safetensors dtype name
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or self.name == "__metadata__":
            raise InvalidInput("a tensor needs a name of its own", seen=repr(self.name))
        if self.dtype not in ITEM_BYTES:
            raise InvalidInput(
                f"dtype of {self.name} is unknown", seen=self.dtype, allowed=", ".join(ITEM_BYTES)
            )
        if any(size < 0 for size in self.shape):
            raise InvalidInput(f"shape of {self.name} has a negative size", seen=self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, row-major, little-endian, without padding."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor and its bytes: row-major, little-endian; never copied here.

    Raises InvalidInput when the bytes do not fill dtype and shape exactly.
    """

    name: str
    dtype: str  # safetensors dtype name: "F32", "BF16", ...
    shape: tuple[int, ...]
    data: memoryview | bytes

    def __post_init__(self) -> None:
        if len(self.view) != self.layout.nbytes:
            raise InvalidInput(
                f"bytes of {self.name} do not fill {self.dtype} {self.shape}",
                seen=len(self.view),
                allowed=self.layout.nbytes,
            )

    @property
    def layout(self) -> TensorLayout:
        """The tensor without its bytes."""
        return TensorLayout(self.name, self.dtype, self.shape)

    @property
    def view(self) -> memoryview:
        """The bytes as a flat view; no copy."""
        view = memoryview(self.data)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def as_numpy(tensor: NamedTensor) -> npt.NDArray[Any]:
    """View of the bytes as an array; bfloat16 and float8 appear as their bits (uint16, uint8).

    No copy.
    """
    return np.frombuffer(tensor.view, dtype=NUMPY_CODES[tensor.dtype]).reshape(tensor.shape)


def from_numpy(name: str, array: npt.NDArray[Any], dtype: str | None = None) -> NamedTensor:
    """Tensor over the array's bytes; copies only an array that is not contiguous.

    `dtype` names what the bits mean where numpy cannot, e.g. "BF16" for uint16.
    """
    rows = np.ascontiguousarray(array).reshape(array.shape)
    known = _NAMES.get(rows.dtype.newbyteorder("<") if rows.dtype.byteorder == ">" else rows.dtype)
    if known is None or rows.dtype.byteorder == ">":
        raise InvalidInput(
            f"numpy dtype of {name} has no safetensors name",
            seen=rows.dtype.str,
            allowed=list(_NAMES),
        )
    return NamedTensor(name, dtype or known, tuple(rows.shape), rows.reshape(-1).view("u1").data)


def crc32(data: bytes | bytearray | memoryview) -> int:
    """CRC-32 of the bytes (zlib, RFC 1952), as an unsigned 32-bit integer."""
    return zlib.crc32(data)


def head_hash(data: bytes | bytearray | memoryview) -> str:
    """Name of an lm_head: sha256 of its bytes, hex, first 16 characters."""
    return hashlib.sha256(data).hexdigest()[:16]
