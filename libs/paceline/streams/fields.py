"""What all entries share: the schema version and the check of a tensor's form."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import DataLoss
from paceline.tensors import NamedTensor

SCHEMA_VERSION = "1"


def require_schema(fields: Mapping[str, str]) -> None:
    """Raise DataLoss unless the entry was written in a layout this code reads."""
    if fields.get("schema_version") != SCHEMA_VERSION:
        raise DataLoss(
            "entry has another layout", seen=fields.get("schema_version"), allowed=SCHEMA_VERSION
        )


def checked(
    tensors: Mapping[str, NamedTensor], name: str, dtype: str, shape: tuple[int | None, ...]
) -> NamedTensor:
    """Tensor `name` if it has this dtype and shape (None = any size); DataLoss otherwise."""
    tensor = tensors.get(name)
    if tensor is None:
        raise DataLoss(f"payload lacks tensor {name}", seen=sorted(tensors))
    fits = len(tensor.shape) == len(shape) and all(
        want in (None, size) for size, want in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        raise DataLoss(
            f"tensor {name} has another form",
            seen=(tensor.dtype, tensor.shape),
            allowed=(dtype, shape),
        )
    return tensor
