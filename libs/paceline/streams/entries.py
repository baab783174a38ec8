"""Encodes hidden rows and trajectories as stream entries, and decodes them; see docs/streams.md.

An entry has a JSON header and a payload of tensors. Row i of hidden rows is the target's state at
the token of absolute position positions[i]. token_ids[i] is that token, token_ids[i + 1] the next
one. The state of the last token is absent: a request of N tokens has T = N - 1 rows and T + 1 token
ids.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import tensors
from paceline.errors import DataLoss, InvalidInput
from paceline.tagged_json import fields_of, to_object
from paceline.telemetry import inject
from paceline.tensors import NamedTensor, as_numpy
from paceline.trajectory import BranchKey, DrawSpan, Trajectory, VersionSpan

SCHEMA_VERSION = "6"
FEATURE_DTYPES = ("BF16", "F32")
FEATURE_HEADER = (
    *("run_id", "step", "session_id", "group_id", "temperature"),
    *("policy_version", "lm_head_hash", "layers", "convention"),
)
FEATURE_ARRAYS = {"versions": "I64", "token_ids": "I32", "positions": "I32", "mask": "U8"}
"""Dtype of each tensor except `hidden`, the fourth. Falling element sizes align each tensor."""
TRAJECTORY_TENSORS = {
    "token_ids": ("I32", 1),
    "loss_mask": ("U8", 1),
    "behavior_logprobs": ("F32", 1),
    "version_spans": ("I64", 2),
    "draw_spans": ("I64", 2),
}
"""Dtype and number of dimensions of each tensor."""
TRAJECTORY_HEADER = tuple(
    one.name
    for one in fields(Trajectory)
    if one.name not in (*TRAJECTORY_TENSORS, "accepted_drafts")
)
_DAMAGED = (ValueError, TypeError, KeyError, OverflowError, RecursionError, InvalidInput)


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
            message = "hidden rows have another form"
            raise InvalidInput(message, seen=seen, allowed=f"[T, H] of {FEATURE_DTYPES}")

        rows = self.rows
        lengths = tuple(
            array.shape for array in (self.token_ids, self.positions, self.mask, self.versions)
        )
        if lengths != ((rows + 1,), (rows,), (rows,), (rows,)):
            message = "arrays of a feature batch do not fit its rows"
            raise InvalidInput(message, seen=lengths, allowed=f"{rows} rows")

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
    parts = [_tensor(name, getattr(batch, name), dtype) for name, dtype in FEATURE_ARRAYS.items()]
    parts.insert(3, batch.hidden)
    header = to_object(batch, FEATURE_HEADER)
    return _written(header, batch.traceparent), tensors.encode_safetensors(parts)


def decode_features(entry: Mapping[str, str], payload: bytes) -> FeatureBatch:
    """The rows of an entry, as views of `payload`. Raises DataLoss for an entry that
    encode_features did not write.
    """
    try:
        read = tensors.decode_safetensors(payload)
        values = fields_of(FeatureBatch, _header_of(entry), FEATURE_HEADER)
        values |= {name: _array(read, name, dtype) for name, dtype in FEATURE_ARRAYS.items()}
        return FeatureBatch(**values, hidden=read["hidden"], traceparent=entry["traceparent"])
    except _DAMAGED as error:
        raise DataLoss("an entry does not decode as a feature batch", seen=repr(error)) from error


_of_version = attrgetter(*(one.name for one in fields(VersionSpan)))
_way = attrgetter(*(one.name for one in fields(DrawSpan)[2:]))  # all fields except start and end
_ACCEPTED = 2
"""Added to the mask of an accepted draft token."""


def encode_trajectory(trajectory: Trajectory) -> tuple[dict[str, str], bytes]:
    """Header and payload of one branch, with the traceparent of the current span."""
    rows: dict[str, Any] = {name: getattr(trajectory, name) for name in TRAJECTORY_TENSORS}
    spans = [_of_version(span) for span in trajectory.version_spans]
    rows["version_spans"] = np.reshape(spans, (len(spans), 3))
    drawn_by = [_way(span) for span in trajectory.draw_spans]
    ways = list(dict.fromkeys(drawn_by))
    drawn = [
        (one.start, one.end, ways.index(way))
        for one, way in zip(trajectory.draw_spans, drawn_by, strict=True)
    ]
    rows["draw_spans"] = np.reshape(drawn, (len(drawn), 3))
    if accepted := trajectory.accepted_drafts:
        rows["loss_mask"] = np.asarray(rows["loss_mask"]) + np.multiply(accepted, _ACCEPTED)
    payload = tensors.encode_safetensors(
        [_tensor(name, rows[name], dtype) for name, (dtype, _) in TRAJECTORY_TENSORS.items()]
    )
    header = to_object(trajectory, TRAJECTORY_HEADER)
    return _written({**header, "ways": ways, "crc32": zlib.crc32(payload)}), payload


def decode_trajectory(entry: Mapping[str, str], payload: bytes) -> Trajectory:
    """The branch of an entry. Raises DataLoss for an entry that encode_trajectory did not write."""
    try:
        header = _header_of(entry)
        ways, written = header.pop("ways"), header.pop("crc32")
        if written != zlib.crc32(payload):
            message = "payload of a trajectory does not match its checksum"
            raise DataLoss(message, seen=zlib.crc32(payload), allowed=written)
        values = fields_of(Trajectory, header, TRAJECTORY_HEADER) | _arrays(payload, ways)
        return Trajectory(**values)
    except _DAMAGED as error:
        raise DataLoss("an entry does not decode as a trajectory", seen=repr(error)) from error


def trajectory_key(entry: Mapping[str, str]) -> str:
    """Ledger key of an entry with an undecodable payload. Raises DataLoss if the header lacks the
    key.
    """
    try:
        return str(BranchKey(**json.loads(entry["header"])["key"]))
    except _DAMAGED as error:
        raise DataLoss("an entry does not name its branch", seen=sorted(entry)) from error


def _written(header: Mapping[str, Any], traceparent: str = "") -> dict[str, str]:
    return {
        "schema_version": SCHEMA_VERSION,
        "header": json.dumps(header, separators=(",", ":")),
        "traceparent": traceparent or inject().get("traceparent", ""),
    }


def _header_of(entry: Mapping[str, str]) -> dict[str, Any]:
    seen = entry.get("schema_version")
    if seen != SCHEMA_VERSION:
        raise DataLoss("entry has another layout", seen=seen, allowed=SCHEMA_VERSION)
    return dict(json.loads(entry["header"]))


def _tensor(name: str, value: Any, dtype: str) -> NamedTensor:
    return tensors.from_numpy(name, np.asarray(value, dtype=tensors.NUMPY_CODES[dtype]))


def _array(
    read: Mapping[str, NamedTensor], name: str, dtype: str, dimensions: int = 1
) -> npt.NDArray[Any]:
    tensor = read[name]
    if (tensor.dtype, len(tensor.shape)) != (dtype, dimensions):
        message, seen = f"tensor {name} has another form", (tensor.dtype, tensor.shape)
        raise DataLoss(message, seen=seen, allowed=f"{dtype} with {dimensions} dimensions")
    return as_numpy(tensor)


def _arrays(
    payload: bytes, ways: Sequence[tuple[str, str, bool, bool]]
) -> dict[str, tuple[Any, ...]]:
    read = tensors.decode_safetensors(payload)
    if any([*map(type, way)] != [str, str, bool, bool] for way in ways):
        raise DataLoss("ways of a trajectory have another form", seen=str(ways)[:200])
    arrays = {
        name: tuple(_array(read, name, *form).tolist()) for name, form in TRAJECTORY_TENSORS.items()
    }
    arrays["version_spans"] = tuple(VersionSpan(*span) for span in arrays["version_spans"])
    masks = arrays["loss_mask"]
    accepted = tuple(one // _ACCEPTED for one in masks)
    arrays["accepted_drafts"] = accepted if any(accepted) else ()
    arrays["loss_mask"] = tuple(one % _ACCEPTED for one in masks)
    named = dict(enumerate(ways))  # a negative number names no path
    arrays["draw_spans"] = tuple(
        DrawSpan(start, end, *named[way]) for start, end, way in arrays["draw_spans"]
    )
    return arrays
