"""Encodes the hidden rows of one finished request as a stream entry, and decodes them.

Row i is the target's state at the token of absolute position positions[i]. token_ids[i] is that
token, token_ids[i + 1] the next one. The state of the last token is absent: a request of N tokens
has T = N - 1 rows and T + 1 token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataLoss, InvalidInput
from paceline.streams.fields import FEATURES, PayloadTensor
from paceline.telemetry import inject
from paceline.tensors import (
    NUMPY_CODES,
    NamedTensor,
    as_numpy,
    decode_safetensors,
    encode_safetensors,
    from_numpy,
)

FEATURE_DTYPES = ("BF16", "F32")


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBatch:
    """Rows of one request: T rows, H hidden size."""

    run_id: str
    step: int
    session_id: str
    policy_version: int  # policy version of the last row
    lm_head_hash: str  # head of the last row's version
    hidden: NamedTensor = field(repr=False)  # [T, H] BF16 or F32
    token_ids: npt.NDArray[np.int32] = field(repr=False)  # [T + 1]
    positions: npt.NDArray[np.int32] = field(repr=False)  # [T]
    mask: npt.NDArray[np.uint8] = field(repr=False)  # [T] 1 for a generated token
    versions: npt.NDArray[np.int64] = field(repr=False)  # [T] policy version that computed the row
    layers: str = "last"
    convention: str = "post_norm"  # the final norm has been applied
    group_id: str = ""
    temperature: float = 1.0
    traceparent: str = ""

    def __post_init__(self) -> None:
        if self.hidden.dtype not in FEATURE_DTYPES or len(self.hidden.shape) != 2:
            seen = (self.hidden.dtype, self.hidden.shape)
            raise InvalidInput(
                "hidden rows have another form", seen=seen, allowed=f"[T, H] of {FEATURE_DTYPES}"
            )

        rows = self.rows
        lengths = tuple(
            array.shape for array in (self.token_ids, self.positions, self.mask, self.versions)
        )
        if lengths != ((rows + 1,), (rows,), (rows,), (rows,)):
            raise InvalidInput(
                "arrays of a feature batch do not fit its rows",
                seen=lengths,
                allowed=f"{rows} rows",
            )

    @property
    def rows(self) -> int:
        """Number of sequence rows, T."""
        return self.hidden.shape[0]

    @property
    def hidden_size(self) -> int:
        """Hidden size, H."""
        return self.hidden.shape[1]


def encode_features(batch: FeatureBatch) -> tuple[dict[str, str], bytes]:
    """Header and payload of one request's rows. The traceparent defaults to the current span's."""
    header = FEATURES.write_header(
        batch,
        dtype=batch.hidden.dtype,
        rows=batch.rows,
        hidden=batch.hidden_size,
        traceparent=batch.traceparent or inject().get("traceparent", ""),
    )
    tensors = [_tensor(one, getattr(batch, one.name)) for one in FEATURES.payload]
    return header, encode_safetensors(tensors)


def _tensor(declared: PayloadTensor, value: NamedTensor | npt.NDArray[Any]) -> NamedTensor:
    if isinstance(value, NamedTensor):
        return NamedTensor(declared.name, value.dtype, value.shape, value.data)
    return from_numpy(declared.name, np.asarray(value, dtype=NUMPY_CODES[declared.dtype]))


def decode_features(header: Mapping[str, str], payload: bytes) -> FeatureBatch:
    """The rows of an entry, as views of `payload`. Raises DataLoss for an entry that
    encode_features did not write.
    """
    try:
        return _decode(header, payload)
    except (ValueError, TypeError, OverflowError, RecursionError, InvalidInput) as error:
        raise DataLoss(
            "an entry does not decode as a feature batch", seen=f"{type(error).__name__}: {error}"
        ) from error


def _decode(header: Mapping[str, str], payload: bytes) -> FeatureBatch:
    values, computed = FEATURES.read_header(header)
    tensors = decode_safetensors(payload)
    rows = computed["rows"]
    sizes = {"T": rows, "T + 1": rows + 1, "H": computed["hidden"]}

    def part(name: str) -> Any:
        found = FEATURES.read_tensor(tensors, name, computed["dtype"], **sizes)
        return found if name.endswith("hidden") else as_numpy(found)

    return FeatureBatch(
        **values,
        **{one.name: part(one.name) for one in FEATURES.payload},
        traceparent=computed["traceparent"],
    )
