"""Pushes a promoted drafter to the gateway. Bytes only; owns no decision."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from drafter_trainer.messages import Judged
from paceline.errors import DataLoss
from paceline.tensors import decode_safetensors
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import PushReport, build_manifest, push_weights


async def push_drafter(
    channel: grpc.aio.Channel, decision: Judged, context: CommandContext, deadline_s: float
) -> PushReport:
    """Prepare and Push of the candidate that lies at `decision.path`; raises what push_weights raises."""
    file = Path(decision.path) / "model.safetensors"
    try:
        data = await asyncio.to_thread(file.read_bytes)
    except OSError as error:
        raise DataLoss("the promoted drafter is not where the rank wrote it", seen=str(error)) from error
    tensors = list(decode_safetensors(data).values())
    manifest = build_manifest(
        WEIGHT_TARGET_DRAFTER,
        decision.drafter_version,
        tensors,
        lm_head_hash=decision.lm_head_hash,
        metadata={"speculator": "eagle"},
    )
    return await push_weights(channel, manifest, tensors, context, deadline_s=deadline_s)
