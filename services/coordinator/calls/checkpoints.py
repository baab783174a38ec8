"""Requests the final checkpoints of both trainers."""

from paceline.errors import PacelineError
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.calls.base import STILL_S, Calls
from paceline.services.coordinator.calls.slots import resume
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.state import Service
from paceline.telemetry import get_logger
from paceline.v1.drafter_pb2 import SaveDrafterCheckpointRequest
from paceline.v1.policy_pb2 import SavePolicyCheckpointRequest

OPTIONAL_STILL_S = 60.0
"""Seconds without progress of an optional service after which the run ends without its answer."""


async def save(calls: Calls, command: commands.SaveCheckpoints) -> None:
    """Emits CheckpointsSaved with the paths. It has no paths if nothing was trained or an optional
    service does not answer.
    """
    try:
        await resume(calls, command)  # agents may send requests after the run
    except PacelineError as error:
        get_logger("coordinator").warning("workers stay lent out", error=str(error))
    paths = {"policy": "", "drafter": ""}
    context = calls.context(command)
    if command.step:
        policy = SavePolicyCheckpointRequest(context=context)
        deadline_s = patient(STILL_S)
        with calls.reported(Service.POLICY_TRAINER, "close", command, deadline_s=deadline_s):
            paths["policy"] = (await calls.peers.save_policy(policy, deadline_s)).path
    if command.step and calls.config.drafter_enabled:
        drafter = SaveDrafterCheckpointRequest(context=context)
        trainer, still_s = calls.peers.drafter_trainer, patient(OPTIONAL_STILL_S)
        try:
            with rpc_errors():
                async with while_moving(trainer, still_s) as timeout:
                    saved = await calls.peers.drafter.SaveDrafterCheckpoint(
                        drafter, timeout=timeout
                    )
            paths["drafter"] = saved.path
        except PacelineError as error:
            calls.went_without(Service.DRAFTER_TRAINER, "close", error)

    calls.emit(events.CheckpointsSaved(calls.now(), command.epoch, paths))


async def keep_if_best(calls: Calls, command: commands.Evaluate, evaluation: float) -> None:
    """Keeps the policy's checkpoint if no earlier evaluation was better. If the trainer does not
    answer, only the checkpoint is missing: the evaluation is still recorded.
    """
    request = SavePolicyCheckpointRequest(context=calls.context(command), evaluation=evaluation)
    try:
        await calls.peers.save_policy(request, patient(STILL_S))
    except PacelineError as error:
        get_logger("coordinator").warning("best checkpoint not kept", error=str(error))
