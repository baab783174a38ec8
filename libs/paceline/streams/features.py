"""Hidden rows of one finished request as a stream entry. It owns their layout; not what a drafter makes of them.

Row i is the target's state at the token of absolute position positions[i]; token_ids[i] is that token, token_ids[i + 1]
the next one. The state of the last token is absent: a request of N tokens has T = N - 1 rows and T + 1 token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataLoss, InvalidInput
from paceline.streams.fields import SCHEMA_VERSION, checked, require_schema
from paceline.telemetry import inject
from paceline.tensors import NamedTensor, as_numpy, decode_safetensors, encode_safetensors, from_numpy

FEATURE_DTYPES = ("BF16", "F32")


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBatch:
    """Rows of one request. T rows, H hidden size."""

    run_id: str
    step: int
    session_id: str
    policy_version: int  # of the last row
    lm_head_hash: str  # head that belongs to the last row's version
    hidden: NamedTensor = field(repr=False)  # [T, H] BF16 or F32
    token_ids: npt.NDArray[np.int32] = field(repr=False)  # [T + 1]
    positions: npt.NDArray[np.int32] = field(repr=False)  # [T]
    mask: npt.NDArray[np.uint8] = field(repr=False)  # [T] 1 where the token was generated
    versions: npt.NDArray[np.int64] = field(repr=False)  # [T] policy version that computed the row
    layers: str = "last"
    convention: str = "post_norm"  # the final norm has been applied
    traceparent: str = ""

    def __post_init__(self) -> None:
        if self.hidden.dtype not in FEATURE_DTYPES or len(self.hidden.shape) != 2:
            seen = (self.hidden.dtype, self.hidden.shape)
            raise InvalidInput("hidden rows have another form", seen=seen, allowed=f"[T, H] of {FEATURE_DTYPES}")
        rows = self.rows
        lengths = tuple(array.shape for array in (self.token_ids, self.positions, self.mask, self.versions))
        if lengths != ((rows + 1,), (rows,), (rows,), (rows,)):
            raise InvalidInput("arrays of a feature batch do not fit its rows", seen=lengths, allowed=f"{rows} rows")

    @property
    def rows(self) -> int:
        """T."""
        return self.hidden.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.hidden.shape[1]


def encode_features(batch: FeatureBatch) -> tuple[dict[str, str], bytes]:
    """Fields and payload of one request's rows; the traceparent defaults to that of the current span."""
    fields = {
        "schema_version": SCHEMA_VERSION,
        "run": batch.run_id,
        "step": str(batch.step),
        "session": batch.session_id,
        "policy_version": str(batch.policy_version),
        "lm_head_hash": batch.lm_head_hash,
        "layers": batch.layers,
        "convention": batch.convention,
        "dtype": batch.hidden.dtype,
        "rows": str(batch.rows),
        "hidden": str(batch.hidden_size),
        "traceparent": batch.traceparent or inject().get("traceparent", ""),
    }
    tensors = [
        from_numpy("versions", batch.versions.astype("<i8", copy=False)),
        from_numpy("token_ids", batch.token_ids.astype("<i4", copy=False)),
        from_numpy("positions", batch.positions.astype("<i4", copy=False)),
        NamedTensor("hidden", batch.hidden.dtype, batch.hidden.shape, batch.hidden.data),
        from_numpy("mask", batch.mask.astype("u1", copy=False)),
    ]
    return fields, encode_safetensors(tensors)


def decode_features(fields: Mapping[str, str], payload: bytes) -> FeatureBatch:
    """The rows of an entry, as views of `payload`; DataLoss when it is not what encode_features writes."""
    require_schema(fields)
    try:
        return _decode(fields, payload)
    except (KeyError, ValueError, TypeError, OverflowError, InvalidInput) as error:
        raise DataLoss(
            "an entry does not decode as a feature batch", seen=f"{type(error).__name__}: {error}"
        ) from error


def _decode(fields: Mapping[str, str], payload: bytes) -> FeatureBatch:
    tensors = decode_safetensors(payload)
    rows, hidden_size = int(fields["rows"]), int(fields["hidden"])

    def array(name: str, dtype: str, size: int) -> npt.NDArray[Any]:
        return as_numpy(checked(tensors, name, dtype, (size,)))

    return FeatureBatch(
        run_id=fields["run"],
        step=int(fields["step"]),
        session_id=fields["session"],
        policy_version=int(fields["policy_version"]),
        lm_head_hash=fields["lm_head_hash"],
        hidden=checked(tensors, "hidden", fields["dtype"], (rows, hidden_size)),
        token_ids=array("token_ids", "I32", rows + 1),
        positions=array("positions", "I32", rows),
        mask=array("mask", "U8", rows),
        versions=array("versions", "I64", rows),
        layers=fields["layers"],
        convention=fields["convention"],
        traceparent=fields["traceparent"],
    )
