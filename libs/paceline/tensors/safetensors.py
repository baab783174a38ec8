"""The safetensors format: u64 header length, JSON header, tensor bytes without gaps. Owns bytes;
not files.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.errors import DataLoss, InvalidInput
from paceline.tensors.tensor import NamedTensor, TensorLayout

_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Longest header the format allows."""


def safetensors_header(
    layouts: Iterable[TensorLayout], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length and JSON header of a file whose tensors follow in this order; a multiple of 8 bytes
    long.
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
    """A whole file in memory: header and the tensors' bytes, copied once."""
    header = safetensors_header((tensor.layout for tensor in tensors), metadata)
    return b"".join((header, *(tensor.view for tensor in tensors)))


def decode_safetensors(buffer: memoryview | bytes) -> dict[str, NamedTensor]:
    """Tensors of a whole file, as views of `buffer`, in stream order; DataLoss when the bytes are
    not a valid file.
    """
    view = memoryview(buffer)
    view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    header, start = _read_header(view)
    header.pop("__metadata__", None)
    spans = sorted(
        (_span(name, entry) for name, entry in header.items()), key=lambda span: (span[1], span[2])
    )
    tensors: dict[str, NamedTensor] = {}
    offset = 0
    for layout, begin, end in spans:
        if begin != offset or end - begin != layout.nbytes:
            allowed = (offset, offset + layout.nbytes)
            raise DataLoss(
                f"bytes of {layout.name} overlap, leave a gap or miss",
                seen=(begin, end),
                allowed=allowed,
            )
        data = view[start + begin : start + end]
        if len(data) != layout.nbytes:
            raise DataLoss(
                f"safetensors bytes end inside {layout.name}", seen=len(data), allowed=layout.nbytes
            )
        tensors[layout.name] = NamedTensor(layout.name, layout.dtype, layout.shape, data)
        offset = end
    if start + offset != len(view):
        raise DataLoss(
            "safetensors bytes go on after the last tensor", seen=len(view), allowed=start + offset
        )
    return tensors


def decode_metadata(buffer: memoryview | bytes) -> dict[str, str]:
    """The `__metadata__` map of a file; empty when it has none."""
    metadata = _read_header(memoryview(buffer))[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise DataLoss(
            "__metadata__ of a safetensors header maps text to text", seen=str(metadata)[:80]
        )
    return metadata


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """Parsed header and the position of the first tensor byte."""
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    room = min(len(view) - _LENGTH_BYTES, MAX_HEADER_BYTES)
    if length > room:
        raise DataLoss(
            "safetensors bytes end inside the header", seen=length, allowed=f"0 to {max(room, 0)}"
        )
    start = _LENGTH_BYTES + length
    try:
        header = json.loads(bytes(view[_LENGTH_BYTES:start]))
    except (ValueError, RecursionError) as error:
        raise DataLoss("safetensors header is not JSON", seen=str(error)[:120]) from error
    if not isinstance(header, dict):
        raise DataLoss("safetensors header is not a JSON object", seen=type(header).__name__)
    return header, start


def _span(name: str, entry: Any) -> tuple[TensorLayout, int, int]:
    """Layout and byte range of one header entry."""
    try:
        begin, end = (_size(value) for value in entry["data_offsets"])
        shape = tuple(_size(value) for value in entry["shape"])
        return TensorLayout(name, str(entry["dtype"]), shape), begin, end
    except (KeyError, TypeError, ValueError, InvalidInput) as error:
        raise DataLoss(
            f"safetensors header entry {name!r} is malformed", seen=str(entry)[:120]
        ) from error


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"not a size: {value!r}")
    return value
