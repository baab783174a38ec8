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
    asked: dict[Service, tuple[str, Any, Any]] = {
        Service.POLICY_TRAINER: ("policy", policy.SavePolicyCheckpoint, SavePolicyCheckpointRequest)
    }
    if calls.config.drafter_enabled:
        save_drafter = drafter.SaveDrafterCheckpoint
        asked[Service.DRAFTER_TRAINER] = ("drafter", save_drafter, SaveDrafterCheckpointRequest)
    paths = {"policy": "", "drafter": ""}
    for service, (name, save_now, request) in asked.items() if command.step else ():
        with (
            calls.reported(service, "close", command, deadline_s=CHECKPOINT_DEADLINE_S),
            rpc_errors(),
        ):
            context = calls.context(command)
            answer = await save_now(request(context=context), timeout=CHECKPOINT_DEADLINE_S)
        paths[name] = answer.path

    calls.emit(events.CheckpointsSaved(calls.now(), command.epoch, paths))
