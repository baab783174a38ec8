"""Calls the trainers: policy steps, trainings of the drafter on leased slots, and checkpoints."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.messages import versions_to_proto
from paceline.rpc import leases, rpc_errors
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.calls import slots
from paceline.services.coordinator.calls.base import RANK_LOST, STEP_ORDER, Calls, log
from paceline.services.coordinator.calls.figures import message_figures
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Service
from paceline.speculators.costs import accept_lengths, round_costs
from paceline.v1 import drafter_pb2, policy_pb2

STILL_S = 300.0
"""Seconds without progress of the policy trainer after which the wait for its checkpoint ends."""
OPTIONAL_STILL_S = 60.0
"""Seconds without progress of an optional service after which the run ends without its answer."""


def trainer_failed(
    calls: Calls, epoch: int, service: Service, error: PacelineError
) -> events.Event | None:
    """The TrainerFailed event of a lost rank, and of any rejection by the drafter trainer: the run
    continues without the drafter and waits only for its service.
    """
    rejected = service is Service.DRAFTER_TRAINER and not _away(error)
    if not rejected and error.reason != RANK_LOST:
        return None
    return events.TrainerFailed(calls.now(), epoch, service, str(error))


def _away(error: PacelineError) -> bool:
    """Whether the service did not answer, as opposed to rejecting the call."""
    away = isinstance(error, Unavailable) and error.reason != RANK_LOST
    return away or isinstance(error, DeadlineExceeded)


# --- policy steps ---------------------------------------------------------------------------------


async def train_policy(calls: Calls, command: commands.TrainPolicy) -> None:
    """Emits WorkersReleased, PolicyStepped and PolicyPrepared; TrainerFailed when a rank died. The
    trainer waits for the groups that closed with the step's rollouts.
    """
    service, deadline_s, epoch = Service.POLICY_TRAINER, calls.config.step_deadline_s, command.epoch
    await slots.release(
        calls, command, command.slots, Holder.POLICY, "policy", deadline_s=deadline_s
    )
    request = policy_pb2.TrainStepRequest(
        context=calls.context(command),
        policy_version=command.policy_version,
        groups=[
            policy_pb2.ExpectedGroup(
                group_id=group.group_id, size=group.sessions, left_out=group.left_out
            )
            for group in calls.groups.of(command.batch)
        ],
        slots=command.slots,
        group_deadline_s=calls.config.group_deadline_s,
    )
    batch: dict[str, events.Figure] = {}
    failed = partial(trainer_failed, calls, epoch, service)
    with calls.reported(service, "policy", command, deadline_s=deadline_s, event_of=failed):
        async for name, answer in _train_step(calls, request):
            match name:
                case "batch":
                    lags = sorted(answer.staleness.items(), key=lambda lag: int(lag[0]))
                    batch = {
                        "trajectories": answer.trajectories,
                        "batch_tokens": answer.tokens,
                        "groups_dropped": sum(answer.dropped.values()),
                        "staleness": dict(lags),
                    }
                case "stepped":
                    figures = batch | message_figures(answer, "policy_version", "beyond")
                    version = answer.policy_version
                    calls.emit(events.PolicyStepped(calls.now(), epoch, version, figures))
                    slots.report_inexact_paths(calls, epoch, answer)
                case "prepared":
                    pushed = {"push_bytes": answer.bytes, "push_s": answer.push_s}
                    version = answer.policy_version
                    calls.emit(events.PolicyPrepared(calls.now(), epoch, version, pushed))


async def push_again(calls: Calls, command: commands.RunTasks | commands.Evaluate) -> None:
    """Pushes the serving policy again; a step that is already trained is only pushed. Emits
    SetDamaged when the trainer has moved on to a newer policy.
    """

    def trained_on(error: PacelineError) -> events.Event | None:
        if error.reason != STEP_ORDER or not isinstance(command, commands.RunTasks):
            return None
        return events.SetDamaged(calls.now(), command.epoch)

    service, deadline_s = Service.POLICY_TRAINER, calls.config.step_deadline_s
    request = policy_pb2.TrainStepRequest(
        context=calls.learner_context(), policy_version=command.versions.policy - 1
    )
    with calls.reported(service, "push", command, deadline_s=deadline_s, event_of=trained_on):
        async for _ in _train_step(calls, request):
            pass


async def _train_step(
    calls: Calls, request: policy_pb2.TrainStepRequest
) -> AsyncGenerator[tuple[str, Any]]:
    """The answers of a step, while the trainer makes progress."""
    trainer = calls.peers.policy_trainer
    async with while_moving(trainer, calls.config.step_deadline_s) as timeout:
        call = calls.peers.policy.TrainStep(request, timeout=timeout)
        async with aclosing(leases.answers(call, last="prepared")) as found:
            async for one in found:
                yield one


# --- trainings of the drafter ---------------------------------------------------------------------


async def activate_drafter(calls: Calls, command: commands.ActivateDrafter) -> None:
    """Emits WorkersReleased, DrafterActivated, the gate's decisions and Detached. Emits Deadline
    when training does not start in time.
    """
    service, what, epoch = Service.DRAFTER_TRAINER, "activation", command.epoch
    deadline_s, step_s = patient(leases.ACTIVATION_S), calls.config.step_deadline_s

    def kept(error: PacelineError) -> events.Event:
        message = f"its slots were not released: {error}"
        return events.TrainerFailed(calls.now(), epoch, service, message)

    await slots.release(
        calls, command, command.slots, Holder.DRAFTER, what, deadline_s=deadline_s, event_of=kept
    )
    if not _live(calls, epoch):
        return  # the lease ended before the engine left
    request = drafter_pb2.ActivateRequest(
        context=calls.context(command),
        slots=command.slots,
        deadline_s=deadline_s,
        versions=versions_to_proto(command.versions),
        max_steps=calls.config.max_drafter_steps,
        round_costs=round_costs(calls.rolled_out.arms),
        accept_lengths=accept_lengths(calls.rolled_out.speculation),
    )
    trainer, failed = calls.peers.drafter_trainer, partial(trainer_failed, calls, epoch, service)
    with calls.reported(service, what, command, deadline_s=deadline_s, event_of=failed):
        async with aclosing(leases.activation(trainer, request, step_s)) as news:
            async for name, answer in news:
                calls.emit(drafter_event(calls.now(), epoch, name, answer))


async def join_drafter(calls: Calls, command: commands.JoinDrafter) -> None:
    """Emits WorkersReleased and DrafterJoined. Emits JoinFailed, or Deadline after
    ACTIVATION_S, when the trainer cannot train on all slots of its lease.
    """
    service, what, deadline_s = Service.DRAFTER_TRAINER, "join", patient(leases.ACTIVATION_S)
    added = command.joining

    def failed(error: PacelineError) -> events.Event | None:
        if _away(error):
            return None
        return events.JoinFailed(calls.now(), command.epoch, str(error))

    await slots.release(
        calls, command, added, Holder.DRAFTER, what, deadline_s=deadline_s, event_of=failed
    )
    if not _live(calls, command.epoch):
        return
    request = drafter_pb2.JoinRequest(context=calls.context(command), slots=command.slots)
    with calls.reported(service, what, command, deadline_s=deadline_s, event_of=failed):
        with rpc_errors():
            answer = await calls.peers.drafter.Join(request, timeout=deadline_s)
        figures = message_figures(answer)
        calls.emit(events.DrafterJoined(calls.now(), command.epoch, len(command.slots), figures))


def _live(calls: Calls, epoch: int) -> bool:
    lease = calls.state().lease
    return lease is not None and lease.epoch == epoch and not lease.preempting


async def preempt_drafter(calls: Calls, command: commands.PreemptDrafter) -> None:
    """Emits Preempted, or Deadline when the trainer answers none of three requests.

    Each request waits for PREEMPT_S, stretched by the load of the machine. A trainer
    that received a request kills late ranks. During rollouts the engine resumes on the slots to
    serve waiting callers.
    """
    service, epoch, deadline_s = Service.DRAFTER_TRAINER, command.epoch, patient(leases.PREEMPT_S)
    failed = partial(trainer_failed, calls, epoch, service)
    with calls.reported(service, "preempt", command, deadline_s=deadline_s, event_of=failed):
        answer = await leases.request_preemption(
            calls.peers.drafter_trainer, calls.context(command), deadline_s
        )
        calls.emit(events.Preempted(calls.now(), epoch, message_figures(answer)))
    await slots.give_back(calls, command.step, epoch)


def drafter_event(at_s: float, epoch: int, name: str, answer: Any) -> events.Event:
    """The event for an ActivateResponse; `name` is its field."""
    match name:
        case "activated":
            return events.DrafterActivated(at_s, epoch, message_figures(answer))
        case "detached":
            figures = message_figures(answer, "reason")
            return events.Detached(at_s, epoch, answer.reason, figures)
    figures = message_figures(answer, "decision", "promoted", "drafter_version")
    if answer.promoted:
        return events.GatePromoted(at_s, epoch, answer.drafter_version, figures)
    return events.GateDecided(at_s, epoch, answer.decision, answer.drafter_version, figures)


# --- checkpoints ----------------------------------------------------------------------------------


async def save_checkpoints(calls: Calls, command: commands.SaveCheckpoints) -> None:
    """Emits CheckpointsSaved with the paths. It has no paths if nothing was trained or an optional
    service does not answer.
    """
    try:
        await slots.resume(calls, command)  # agents may send requests after the run
    except PacelineError as error:
        log.warning("workers stay lent out", error=str(error))
    paths, context = {"policy": "", "drafter": ""}, calls.context(command)
    if command.step:
        policy, still_s = policy_pb2.SavePolicyCheckpointRequest(context=context), patient(STILL_S)
        with calls.reported(Service.POLICY_TRAINER, "close", command, deadline_s=still_s):
            paths["policy"] = (await calls.peers.save_policy(policy, still_s)).path
    if command.step and calls.config.drafter_enabled:
        drafter = drafter_pb2.SaveDrafterCheckpointRequest(context=context)
        trainer, save = calls.peers.drafter_trainer, calls.peers.drafter.SaveDrafterCheckpoint
        try:
            with rpc_errors():
                async with while_moving(trainer, patient(OPTIONAL_STILL_S)) as timeout:
                    paths["drafter"] = (await save(drafter, timeout=timeout)).path
        except PacelineError as error:
            calls.went_without(Service.DRAFTER_TRAINER, "close", error)

    calls.emit(events.CheckpointsSaved(calls.now(), command.epoch, paths))


async def keep_if_best(calls: Calls, command: commands.Evaluate, evaluation: float) -> None:
    """Keeps the policy's checkpoint if no earlier evaluation was better. If the trainer does not
    answer, only the checkpoint is missing: the evaluation is still recorded.
    """
    request = policy_pb2.SavePolicyCheckpointRequest(
        context=calls.context(command), evaluation=evaluation
    )
    try:
        await calls.peers.save_policy(request, patient(STILL_S))
    except PacelineError as error:
        log.warning("best checkpoint not kept", error=str(error))
