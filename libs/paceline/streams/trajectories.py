"""A trajectory as a stream entry: what a reader filters by stands in the fields, the arrays in a
safetensors payload.

It does not append; Ledger.append_final does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.errors import DataLoss, InvalidInput
from paceline.streams.fields import SCHEMA_VERSION, checked, require_schema
from paceline.telemetry import inject
from paceline.tensors import as_numpy, crc32, decode_safetensors, encode_safetensors, from_numpy
from paceline.trajectory import BranchKey, SpeculationStats, Trajectory, VersionSpan

_DTYPES = {
    "token_ids": "I32",
    "loss_mask": "U8",
    "behavior_logprobs": "F32",
    "version_spans": "I64",
}


def encode_trajectory(
    trajectory: Trajectory, traceparent: str = ""
) -> tuple[dict[str, str], bytes]:
    """Fields and payload of one branch; `traceparent` defaults to that of the current span.

    Payload: token_ids i32 [T], loss_mask u8 [T], behavior_logprobs f32 [T], version_spans i64 [N,
    3].
    """
    spans = [(span.start, span.end, span.policy_version) for span in trajectory.version_spans]
    arrays = {
        "token_ids": np.asarray(trajectory.token_ids, dtype="<i4"),
        "loss_mask": np.asarray(trajectory.loss_mask, dtype="u1"),
        "behavior_logprobs": np.asarray(trajectory.behavior_logprobs, dtype="<f4"),
        "version_spans": np.asarray(spans, dtype="<i8").reshape(len(spans), 3),
    }
    payload = encode_safetensors([from_numpy(name, array) for name, array in arrays.items()])
    return _fields(trajectory, traceparent or inject().get("traceparent", ""), payload), payload


def _fields(trajectory: Trajectory, traceparent: str, payload: bytes) -> dict[str, str]:
    stats = trajectory.speculation
    return {
        "schema_version": SCHEMA_VERSION,
        "run": trajectory.key.run_id,
        "session": trajectory.key.session_id,
        "branch": trajectory.key.branch_id,
        "branch_count": str(trajectory.branch_count),
        "step": str(trajectory.step),
        "task": trajectory.task_id,
        "group": trajectory.group_id,
        "group_size": str(trajectory.group_size),
        "task_index": str(trajectory.task_index),
        "sample_index": str(trajectory.sample_index),
        "reward": "" if trajectory.reward is None else repr(float(trajectory.reward)),
        "seed": str(trajectory.seed),
        "temperature": repr(float(trajectory.temperature)),
        "finish_reason": trajectory.finish_reason,
        "policy_version": str(
            max((span.policy_version for span in trajectory.version_spans), default=0)
        ),
        "speculation": ",".join(
            str(count)
            for count in (
                stats.target_steps,
                stats.drafted_tokens,
                stats.accepted_tokens,
                stats.drafted_round_tokens,
                stats.drafted_rounds,
            )
        ),
        "crc32": str(crc32(payload)),
        "traceparent": traceparent,
    }


def decode_trajectory(fields: Mapping[str, str], payload: bytes) -> Trajectory:
    """The branch of an entry; DataLoss when fields or payload are not what encode_trajectory
    writes.
    """
    require_schema(fields)
    try:
        if int(fields["crc32"]) != crc32(payload):
            raise DataLoss(
                "payload of a trajectory does not match its checksum", seen=crc32(payload)
            )
        return _decode(fields, _arrays(payload))
    except (KeyError, ValueError, TypeError, OverflowError, InvalidInput) as error:
        raise DataLoss("an entry does not decode as a trajectory", seen=repr(error)) from error


def trajectory_key(fields: Mapping[str, str]) -> str:
    """Ledger key of an entry, for one whose payload does not decode; DataLoss when the fields do
    not name it.
    """
    try:
        return str(BranchKey(fields["run"], fields["session"], fields["branch"]))
    except KeyError as error:
        raise DataLoss("an entry does not name its branch", seen=sorted(fields)) from error


def _arrays(payload: bytes) -> dict[str, list[Any]]:
    tensors = decode_safetensors(payload)
    for name, dtype in _DTYPES.items():
        checked(tensors, name, dtype, (None, 3) if name == "version_spans" else (None,))
    return {name: as_numpy(tensors[name]).tolist() for name in _DTYPES}


def _decode(fields: Mapping[str, str], arrays: dict[str, list[Any]]) -> Trajectory:
    target_steps, drafted, accepted, round_tokens, rounds = (
        int(part) for part in fields["speculation"].split(",")
    )
    return Trajectory(
        key=BranchKey(fields["run"], fields["session"], fields["branch"]),
        step=int(fields["step"]),
        task_id=fields["task"],
        group_id=fields["group"],
        group_size=int(fields["group_size"]),
        task_index=int(fields["task_index"]),
        sample_index=int(fields["sample_index"]),
        token_ids=tuple(arrays["token_ids"]),
        loss_mask=tuple(arrays["loss_mask"]),
        behavior_logprobs=tuple(arrays["behavior_logprobs"]),
        version_spans=tuple(VersionSpan(*span) for span in arrays["version_spans"]),
        reward=float(fields["reward"]) if fields["reward"] else None,
        seed=int(fields["seed"]),
        temperature=float(fields["temperature"]),
        finish_reason=fields["finish_reason"],
        speculation=SpeculationStats(target_steps, drafted, accepted, round_tokens, rounds),
        branch_count=int(fields["branch_count"]),
    )
