"""Calls the drafter trainer to train on leased slots and to return them."""

import asyncio
from collections.abc import Callable
from typing import Any

from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.messages import versions_to_proto
from paceline.rpc import rpc_errors
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.calls.base import RANK_LOST, Calls, answers
from paceline.services.coordinator.calls.figures import accept_lengths, message_figures, round_costs
from paceline.services.coordinator.calls.slots import PREEMPT_S, give_back, preempted, release
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event, Figure
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Service
from paceline.v1 import drafter_pb2

ACTIVATION_S = 30.0
"""Maximum time from a lease to the drafter's training, on an idle machine, seconds."""


async def activate(calls: Calls, command: commands.ActivateDrafter) -> None:
    """Emits WorkersReleased, DrafterActivated, the gate's decisions and Detached. Emits Deadline
    when training does not start in time.
    """

    def kept(error: PacelineError) -> Event:
        message = f"its slots were not released: {error}"
        return events.TrainerFailed(calls.now(), command.epoch, Service.DRAFTER_TRAINER, message)

    slots, what, deadline_s = command.slots, "activation", patient(ACTIVATION_S)
    trainer = calls.peers.drafter_trainer
    await release(calls, command, slots, Holder.DRAFTER, what, deadline_s=deadline_s, event_of=kept)
    if not _live(calls, command.epoch):
        return  # the lease ended before the engine left
    request = drafter_pb2.ActivateRequest(
        context=calls.context(command),
        slots=slots,
        deadline_s=deadline_s,
        versions=versions_to_proto(command.versions),
        max_steps=calls.config.max_drafter_steps,
        round_costs=round_costs(calls.rolled_out.arms),
        accept_lengths=accept_lengths(calls.rolled_out.speculation),
    )
    with calls.reported(
        Service.DRAFTER_TRAINER,
        what,
        command,
        deadline_s=deadline_s,
        event_of=_trainer_failed(calls, command.epoch),
    ):
        async with (
            while_moving(trainer, calls.config.step_deadline_s) as timeout,
            asyncio.timeout(deadline_s) as until_activated,
        ):
            call = calls.peers.drafter.Activate(request, timeout=timeout)
            async for name, answer in answers(call, last="detached"):
                if name == "activated":
                    until_activated.reschedule(None)
                calls.emit(_event(calls.now(), command.epoch, name, answer))


async def join(calls: Calls, command: commands.JoinDrafter) -> None:
    """Emits WorkersReleased and DrafterJoined. Emits JoinFailed, or Deadline after
    ACTIVATION_S, when the trainer cannot train on all slots of its lease.
    """

    def failed(error: PacelineError) -> Event | None:
        if _away(error):
            return None
        return events.JoinFailed(calls.now(), command.epoch, str(error))

    slots, deadline_s = command.joining, patient(ACTIVATION_S)
    await release(
        calls, command, slots, Holder.DRAFTER, "join", deadline_s=deadline_s, event_of=failed
    )
    if not _live(calls, command.epoch):
        return
    request = drafter_pb2.JoinRequest(context=calls.context(command), slots=command.slots)
    with calls.reported(
        Service.DRAFTER_TRAINER, "join", command, deadline_s=deadline_s, event_of=failed
    ):
        with rpc_errors():
            answer = await calls.peers.drafter.Join(request, timeout=deadline_s)
        figures = message_figures(answer)
        calls.emit(events.DrafterJoined(calls.now(), command.epoch, len(command.slots), figures))


def _live(calls: Calls, epoch: int) -> bool:
    lease = calls.state().lease
    return lease is not None and lease.epoch == epoch and not lease.preempting


async def preempt(calls: Calls, command: commands.PreemptDrafter) -> None:
    """Emits Preempted, or Deadline when the trainer answers none of three requests.

    Each request waits for PREEMPT_S, stretched by the load of the machine. A trainer
    that received a request kills late ranks. During rollouts the engine resumes on the slots to
    serve waiting callers.
    """
    with calls.reported(
        Service.DRAFTER_TRAINER,
        "preempt",
        command,
        deadline_s=patient(PREEMPT_S),
        event_of=_trainer_failed(calls, command.epoch),
    ):
        answer = await preempted(calls, calls.context(command))
        calls.emit(events.Preempted(calls.now(), command.epoch, message_figures(answer)))
    await give_back(calls, command.step, command.epoch)


def _trainer_failed(calls: Calls, epoch: int) -> Callable[[PacelineError], Event | None]:
    """Returns the events of a failed drafter trainer. The run continues without the drafter and
    waits only for its service.
    """

    def event_of(error: PacelineError) -> Event | None:
        if _away(error):
            return None
        return events.TrainerFailed(calls.now(), epoch, Service.DRAFTER_TRAINER, str(error))

    return event_of


def _away(error: PacelineError) -> bool:
    """Whether the service did not answer, as opposed to rejecting the call."""
    away = isinstance(error, Unavailable) and error.reason != RANK_LOST
    return away or isinstance(error, DeadlineExceeded)


def _event(at_s: float, epoch: int, name: str, answer: Any) -> Event:
    """The event for an ActivateResponse; `name` is its field."""
    match name:
        case "activated":
            return events.DrafterActivated(at_s, epoch, message_figures(answer))
        case "detached":
            figures = message_figures(answer, "reason")
            return events.Detached(at_s, epoch, answer.reason, figures)
    figures = gate_figures(answer)
    if answer.promoted:
        return events.GatePromoted(at_s, epoch, answer.drafter_version, figures)
    return events.GateDecided(at_s, epoch, answer.decision, answer.drafter_version, figures)


def gate_figures(gate: drafter_pb2.GateDecision) -> dict[str, Figure]:
    """All figures of a gate decision that the journal keeps."""
    return message_figures(gate, "decision", "promoted", "drafter_version")
