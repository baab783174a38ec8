"""Holds named tensors as raw bytes and reads and writes the safetensors format, without torch.

Format: u64 header length, JSON header, tensor bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataLoss, InvalidInput

CONFIG, ACCEPTANCE, ADAPTERS = "config", "acceptance", "adapters"
DOCUMENTS = {CONFIG: "config.json", ACCEPTANCE: "acceptance.json", ADAPTERS: "adapters.json"}
"""JSON documents beside a version's tensors: file name by metadata key of a manifest. Each value is
the text of a JSON object, which becomes that file. `config` describes the tensors. `acceptance`
describes which drafts of a drafter are accepted. `adapters` identifies the base weights of a
policy's adapters.
"""

_LENGTH_BYTES = 8

MAX_DIMENSIONS = 8
MAX_TENSOR_BYTES = 2**63 - 1
MAX_TENSORS = 100_000
"""Maximum tensors in a file or a push."""

# numpy has no bfloat16 and no float8, so their bits appear as unsigned integers.
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
"""numpy type code by safetensors dtype name."""
_SIZES = {name: np.dtype(code).itemsize for name, code in NUMPY_CODES.items()}
_ALL_ONES = {
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7C,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F32": 0x7F80_0000,
    "F64": 0x7FF0_0000_0000_0000,
}
"""Bits that are all 1 in a NaN or infinity: the exponent bits, in E4M3 also the fraction bits."""
_BLOCK = 1 << 16  # words per check: the block stays in the cache
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
        if self.dtype not in NUMPY_CODES:
            message = f"dtype of {self.name} is unknown"
            raise InvalidInput(message, seen=self.dtype, allowed=", ".join(NUMPY_CODES))
        if len(self.shape) > MAX_DIMENSIONS:
            message = f"shape of {self.name} has too many dimensions"
            raise InvalidInput(message, seen=len(self.shape), allowed=f"at most {MAX_DIMENSIONS}")
        if any(size < 0 for size in self.shape):
            raise InvalidInput(f"shape of {self.name} has a negative size", seen=self.shape)
        if max(self.shape, default=0) > MAX_TENSOR_BYTES or self.nbytes > MAX_TENSOR_BYTES:
            message = f"{self.name} is larger than any memory"
            raise InvalidInput(message, seen=self.shape, allowed=f"{MAX_TENSOR_BYTES} bytes")

    @property
    def nbytes(self) -> int:
        """Size in bytes: row-major, little-endian, without padding."""
        return math.prod(self.shape) * _SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor and its bytes: row-major, little-endian, never copied here.

    Raises InvalidInput if the bytes do not match dtype and shape exactly.
    """

    name: str
    dtype: str  # safetensors dtype name: "F32", "BF16", ...
    shape: tuple[int, ...]
    data: memoryview | bytes

    def __post_init__(self) -> None:
        if len(self.view) != self.layout.nbytes:
            message = f"bytes of {self.name} do not fill {self.dtype} {self.shape}"
            raise InvalidInput(message, seen=len(self.view), allowed=self.layout.nbytes)

    @property
    def layout(self) -> TensorLayout:
        """The tensor's name, dtype and shape."""
        return TensorLayout(self.name, self.dtype, self.shape)

    @property
    def view(self) -> memoryview:
        """The bytes as a flat view; no copy."""
        view = memoryview(self.data)
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def as_numpy(tensor: NamedTensor) -> npt.NDArray[Any]:
    """The bytes as an array, without a copy.

    bfloat16 and float8 appear as their bits (uint16, uint8).
    """
    return np.frombuffer(tensor.view, dtype=NUMPY_CODES[tensor.dtype]).reshape(tensor.shape)


def from_numpy(name: str, array: npt.NDArray[Any], dtype: str | None = None) -> NamedTensor:
    """A tensor over the array's bytes; copies only an array that is not contiguous.

    `dtype` gives the meaning of the bits for types that numpy lacks, e.g. "BF16" for uint16. Raises
    InvalidInput for a numpy dtype without a safetensors name.
    """
    rows = np.ascontiguousarray(array).reshape(array.shape)
    known = _NAMES.get(rows.dtype.newbyteorder("<") if rows.dtype.byteorder == ">" else rows.dtype)
    if known is None or rows.dtype.byteorder == ">":
        message = f"numpy dtype of {name} has no safetensors name"
        raise InvalidInput(message, seen=rows.dtype.str, allowed=list(_NAMES))
    return NamedTensor(name, dtype or known, tuple(rows.shape), rows.reshape(-1).view("u1").data)


def is_finite(tensor: NamedTensor) -> bool:
    """Whether the tensor has no NaN and no infinity."""
    if tensor.dtype not in _ALL_ONES:
        return True
    ones = _ALL_ONES[tensor.dtype]
    words = np.frombuffer(tensor.view, dtype=f"<u{_SIZES[tensor.dtype]}")
    blocks = (words[start : start + _BLOCK] for start in range(0, len(words), _BLOCK))
    return all(int(np.bitwise_and(block, words.dtype.type(ones)).max()) != ones for block in blocks)


def head_hash(data: bytes | bytearray | memoryview) -> str:
    """Name of an lm_head: the first 16 hex characters of the sha256 of its bytes."""
    return head_hash_of([data])


def head_hash_of(parts: Iterable[bytes | bytearray | memoryview]) -> str:
    """As head_hash, for bytes in several pieces."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def safetensors_header(
    layouts: Iterable[TensorLayout], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Header length and JSON header for tensors in this order; a multiple of 8 bytes in size.

    Raises InvalidInput for two tensors of one name.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for layout in layouts:
        if layout.name in header:
            raise InvalidInput("two tensors have the same name", seen=layout.name)
        end = offset + layout.nbytes
        header[layout.name] = {
            "dtype": layout.dtype,
            "shape": list(layout.shape),
            "data_offsets": [offset, end],
        }
        offset = end

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def encode_safetensors(
    tensors: Sequence[NamedTensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A complete file in memory; copies the tensors' bytes once."""
    header = safetensors_header((tensor.layout for tensor in tensors), metadata)
    return b"".join((header, *(tensor.view for tensor in tensors)))


def decode_safetensors(buffer: memoryview | bytes) -> dict[str, NamedTensor]:
    """Tensors of a complete file in stream order, as views of `buffer`. Raises DataLoss if the
    bytes are not a valid file.
    """
    view = memoryview(buffer)
    view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    start = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    tensors: dict[str, NamedTensor] = {}
    position = 0
    try:
        header = json.loads(bytes(view[_LENGTH_BYTES:start]))
        header.pop("__metadata__", None)
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        for begin, end, name in spans:
            if begin != position:
                raise ValueError(f"{name} begins at {begin}, not at {position}")
            dtype, shape = header[name]["dtype"], tuple(header[name]["shape"])
            if any(type(size) is not int for size in shape):
                raise TypeError(f"shape of {name}: {shape}")
            data = view[start + begin : start + end]
            tensors[name] = NamedTensor(name, dtype, shape, data)
            position += len(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidInput) as error:
        raise DataLoss("bytes are not a safetensors file", seen=repr(error)[:120]) from error
    if start + position != len(view):
        message = "safetensors bytes go on after the last tensor"
        raise DataLoss(message, seen=len(view), allowed=start + position)
    return tensors
