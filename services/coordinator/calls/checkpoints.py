"""Calls both trainers for the checkpoints that end a run."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.rpc import rpc_errors
from paceline.services.coordinator.calls.base import Calls
from paceline.services.coordinator.calls.slots import resume
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.state import Service
from paceline.telemetry import get_logger
from paceline.v1.drafter_pb2 import SaveDrafterCheckpointRequest
from paceline.v1.policy_pb2 import SavePolicyCheckpointRequest

CHECKPOINT_DEADLINE_S = 300.0
OPTIONAL_DEADLINE_S = 60.0


async def save(calls: Calls, command: commands.SaveCheckpoints) -> None:
    """Emits CheckpointsSaved with the paths; empty where nothing was trained, or where an optional
    service does not answer.
    """
    try:
        await resume(calls, command)  # agents may go on after the run
    except PacelineError as error:
        get_logger("coordinator").warning("workers stay lent out", error=str(error))
    paths = {"policy": "", "drafter": ""}
    context = calls.context(command)
    if command.step:
        policy = SavePolicyCheckpointRequest(context=context)
        deadline_s = CHECKPOINT_DEADLINE_S
        with (
            calls.reported(Service.POLICY_TRAINER, "close", command, deadline_s=deadline_s),
            rpc_errors(),
        ):
            saved = await calls.peers.policy.SavePolicyCheckpoint(policy, timeout=deadline_s)
        paths["policy"] = saved.path
    if command.step and calls.config.drafter_enabled:
        drafter = SaveDrafterCheckpointRequest(context=context)
        try:
            with rpc_errors():
                saved = await calls.peers.drafter.SaveDrafterCheckpoint(
                    drafter, timeout=OPTIONAL_DEADLINE_S
                )
            paths["drafter"] = saved.path
        except PacelineError as error:
            calls.went_without(Service.DRAFTER_TRAINER, "close", error)

    calls.emit(events.CheckpointsSaved(calls.now(), command.epoch, paths))


async def keep_if_best(calls: Calls, command: commands.Evaluate, evaluation: float) -> None:
    """Has the policy's checkpoint kept if none was evaluated better. A trainer that does not answer
    misses it: the evaluation itself is not lost.
    """
    request = SavePolicyCheckpointRequest(context=calls.context(command), evaluation=evaluation)
    try:
        with rpc_errors():
            await calls.peers.policy.SavePolicyCheckpoint(request, timeout=CHECKPOINT_DEADLINE_S)
    except PacelineError as error:
        get_logger("coordinator").warning("best checkpoint not kept", error=str(error))
