"""Encodes hidden rows and trajectories as stream entries, and decodes them.

Row i is the target's state at the token of absolute position positions[i]. token_ids[i] is that
token, token_ids[i + 1] the next one. The state of the last token is absent: a request of N tokens
has T = N - 1 rows and T + 1 token ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataLoss, InvalidInput
from paceline.streams.fields import FEATURES, TRAJECTORIES, PayloadTensor
from paceline.telemetry import inject
from paceline.tensors import (
    NUMPY_CODES,
    NamedTensor,
    as_numpy,
    decode_safetensors,
    encode_safetensors,
    from_numpy,
)
from paceline.trajectory import BranchKey, DrawSpan, Trajectory, VersionSpan

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


_SPANS, _DRAWN, _MASK = "version_spans", "draw_spans", "loss_mask"
_of_version = attrgetter(*(one.name for one in fields(VersionSpan)))
_way = attrgetter(*(one.name for one in fields(DrawSpan)[2:]))  # all fields except start and end
_ACCEPTED = 2
"""Added to the mask of an accepted draft token."""


def encode_trajectory(
    trajectory: Trajectory, traceparent: str = ""
) -> tuple[dict[str, str], bytes]:
    """Header and payload of one branch; `traceparent` defaults to the current span's."""
    rows: dict[str, Any] = {one.name: getattr(trajectory, one.name) for one in TRAJECTORIES.payload}
    spans = [_of_version(span) for span in trajectory.version_spans]
    rows[_SPANS] = np.reshape(spans, (len(spans), 3))
    drawn_by = [_way(span) for span in trajectory.draw_spans]
    ways = list(dict.fromkeys(drawn_by))
    drawn = [
        (one.start, one.end, ways.index(way))
        for one, way in zip(trajectory.draw_spans, drawn_by, strict=True)
    ]
    if accepted := trajectory.accepted_drafts:
        rows[_MASK] = np.asarray(rows[_MASK]) + np.multiply(accepted, _ACCEPTED)
    rows[_DRAWN] = np.reshape(drawn, (len(drawn), 3))
    payload = encode_safetensors(
        [
            from_numpy(one.name, np.asarray(rows[one.name], dtype=NUMPY_CODES[one.dtype]))
            for one in TRAJECTORIES.payload
        ]
    )
    header = TRAJECTORIES.write_header(
        trajectory,
        policy_version=max((span.policy_version for span in trajectory.version_spans), default=0),
        ways=ways,
        crc32=zlib.crc32(payload),
        traceparent=traceparent or inject().get("traceparent", ""),
    )
    return header, payload


def decode_trajectory(header: Mapping[str, str], payload: bytes) -> Trajectory:
    """The branch of an entry. Raises DataLoss for an entry that encode_trajectory did not write."""
    try:
        values, computed = TRAJECTORIES.read_header(header)
        if computed["crc32"] != zlib.crc32(payload):
            raise DataLoss(
                "payload of a trajectory does not match its checksum", seen=zlib.crc32(payload)
            )
        key = BranchKey(**{one.name: values.pop(f"key.{one.name}") for one in fields(BranchKey)})
        return Trajectory(key=key, **values | _arrays(payload, computed["ways"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, InvalidInput) as error:
        raise DataLoss("an entry does not decode as a trajectory", seen=repr(error)) from error


def trajectory_key(header: Mapping[str, str]) -> str:
    """Ledger key of an entry with an undecodable payload. Raises DataLoss if the header lacks the
    key.
    """
    try:
        return str(BranchKey(header["run"], header["session"], header["branch"]))
    except KeyError as error:
        raise DataLoss("an entry does not name its branch", seen=sorted(header)) from error


def _arrays(
    payload: bytes, ways: Sequence[tuple[str, str, bool, bool]]
) -> dict[str, tuple[Any, ...]]:
    tensors = decode_safetensors(payload)
    arrays = {
        one.name: tuple(as_numpy(TRAJECTORIES.read_tensor(tensors, one.name)).tolist())
        for one in TRAJECTORIES.payload
    }
    arrays[_SPANS] = tuple(VersionSpan(*span) for span in arrays[_SPANS])
    masks = arrays[_MASK]
    accepted = tuple(one // _ACCEPTED for one in masks)
    arrays["accepted_drafts"] = accepted if any(accepted) else ()
    arrays[_MASK] = tuple(one % _ACCEPTED for one in masks)
    named = dict(enumerate(ways))  # a negative number names no path
    arrays[_DRAWN] = tuple(DrawSpan(start, end, *named[way]) for start, end, way in arrays[_DRAWN])
    return arrays
