"""Encodes a trajectory as a stream entry and decodes it. Fields that readers filter by are in the
header, arrays in a safetensors payload.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from paceline.errors import DataLoss, InvalidInput
from paceline.streams.fields import TRAJECTORIES
from paceline.telemetry import inject
from paceline.tensors import (
    NUMPY_CODES,
    as_numpy,
    decode_safetensors,
    encode_safetensors,
    from_numpy,
)
from paceline.trajectory import BranchKey, DrawSpan, Trajectory, VersionSpan

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
