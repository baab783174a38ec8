"""Calls both trainers for the checkpoints that end a run."""

from __future__ import annotations

from typing import Any

from coordinator.calls.base import Calls
from coordinator.machine import commands, events
from coordinator.machine.state import Service
from paceline.rpc import rpc_errors
from paceline.v1.drafter_pb2 import SaveDrafterCheckpointRequest
from paceline.v1.policy_pb2 import SavePolicyCheckpointRequest

CHECKPOINT_DEADLINE_S = 300.0


async def save(calls: Calls, command: commands.SaveCheckpoints) -> None:
    """Emits CheckpointsSaved with the paths; empty where nothing was trained."""
    policy, drafter = calls.peers.policy, calls.peers.drafter
    context = calls.context(command)
    paths = {"policy": "", "drafter": ""}
    if command.step:
        request: Any = SavePolicyCheckpointRequest(context=context)
        save_policy = policy.SavePolicyCheckpoint
        paths["policy"] = await _save(calls, command, Service.POLICY_TRAINER, save_policy, request)
    if command.step and calls.config.drafter_enabled:
        request = SaveDrafterCheckpointRequest(context=context)
        save_drafter = drafter.SaveDrafterCheckpoint
        paths["drafter"] = await _save(
            calls, command, Service.DRAFTER_TRAINER, save_drafter, request
        )
    calls.emit(events.CheckpointsSaved(calls.now(), command.epoch, paths))


async def _save(
    calls: Calls, command: commands.SaveCheckpoints, service: Service, save: Any, request: Any
) -> str:
    with (
        calls.reported(service, "close", command, deadline_s=CHECKPOINT_DEADLINE_S),
        rpc_errors(),
    ):
        answer = await save(request, timeout=CHECKPOINT_DEADLINE_S)
    return str(answer.path)
