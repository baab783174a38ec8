"""Calls the drafter trainer: training on leased slots, and their return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from coordinator.calls.base import RANK_LOST, Calls, answers
from coordinator.machine import commands, events
from coordinator.machine.events import Event, Figure
from coordinator.machine.state import Service
from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.messages import versions_to_proto
from paceline.rpc import rpc_errors
from paceline.v1 import drafter_pb2


async def activate(calls: Calls, command: commands.ActivateDrafter) -> None:
    """Emits DrafterActivated, the gate's decisions and Detached; Deadline when training does not
    begin in time.
    """
    request = drafter_pb2.ActivateRequest(
        context=calls.context(command),
        slots=command.slots,
        deadline_s=command.deadline_s,
        versions=versions_to_proto(command.versions),
        max_steps=calls.config.max_drafter_steps,
        round_costs=calls.round_costs,
    )
    with calls.reported(
        Service.DRAFTER_TRAINER,
        "activation",
        command.epoch,
        deadline_s=command.deadline_s,
        event_of=_trainer_failed(calls, command.epoch),
    ):
        call = calls.peers.drafter.Activate(request, timeout=calls.config.step_deadline_s)
        async with asyncio.timeout(command.deadline_s) as until_activated:
            async for name, answer in answers(call, last="detached"):
                if name == "activated":
                    until_activated.reschedule(None)
                calls.emit(_EVENTS[name](calls.now(), command.epoch, answer))


async def preempt(calls: Calls, command: commands.PreemptDrafter) -> None:
    """Emits Preempted; Deadline after the command's seconds: then the trainer kills its ranks."""
    with calls.reported(
        Service.DRAFTER_TRAINER,
        "preempt",
        command.epoch,
        deadline_s=command.deadline_s,
        event_of=_trainer_failed(calls, command.epoch),
    ):
        request = drafter_pb2.PreemptRequest(context=calls.context(command))
        with rpc_errors():
            answer = await calls.peers.drafter.Preempt(request, timeout=command.deadline_s)
        figures: dict[str, Figure] = {
            "stopped_after_s": answer.stopped_after_s,
            "was_active": int(answer.was_active),
        }
        calls.emit(events.Preempted(calls.now(), command.epoch, figures))


def _trainer_failed(calls: Calls, epoch: int) -> Callable[[PacelineError], Event | None]:
    """Whatever ails the drafter, the run goes on without it; only its service is waited for."""

    def event_of(error: PacelineError) -> Event | None:
        away = isinstance(error, Unavailable) and error.reason != RANK_LOST
        if away or isinstance(error, DeadlineExceeded):
            return None
        return events.TrainerFailed(calls.now(), epoch, Service.DRAFTER_TRAINER, str(error))

    return event_of


def _activated(at_s: float, epoch: int, activated: drafter_pb2.Activated) -> Event:
    figures = {"attach_s": activated.attach_s, "world_size": activated.world_size}
    return events.DrafterActivated(at_s, epoch, figures)


def _gate(at_s: float, epoch: int, gate: drafter_pb2.GateDecision) -> Event:
    figures = gate_figures(gate)
    if gate.promoted:
        return events.GatePromoted(at_s, epoch, gate.drafter_version, figures)
    return events.GateDecided(at_s, epoch, gate.decision, gate.drafter_version, figures)


def _detached(at_s: float, epoch: int, detached: drafter_pb2.Detached) -> Event:
    figures: dict[str, Figure] = {
        "steps": detached.steps,
        "micro_batches": detached.micro_batches,
        "tokens": detached.tokens,
        "loss": detached.loss,
        "busy_s": detached.busy_s,
        "total_steps": detached.total_steps,
        "dropped": dict(detached.dropped),
    }
    return events.Detached(at_s, epoch, detached.reason, figures)


_EVENTS: dict[str, Callable[[float, int, Any], Event]] = {
    "activated": _activated,
    "gate": _gate,
    "detached": _detached,
}
"""Field of ActivateResponse -> the event of what it holds."""


def gate_figures(gate: drafter_pb2.GateDecision) -> dict[str, Figure]:
    """Everything that the journal keeps of a decision of the drafter's gate."""
    names = (
        "candidate_accept_length",
        "serving_accept_length",
        "noise",
        "candidate_speedup",
        "serving_speedup",
        "speedup_noise",
        "policy_version",
        "positions",
        "optimizer_steps",
        "temperature",
        "kind",
    )
    return {
        **{name: getattr(gate, name) for name in names},
        "costs_measured": int(gate.costs_measured),
        **{
            name: tuple(getattr(gate, name))
            for name in ("survival", "conditional", "serving_survival")
        },
        "lengths_by_bucket": dict(gate.lengths_by_bucket),
        "leaderboard_speedups": {one.kind: one.speedup for one in gate.leaderboard},
        "leaderboard_lengths": {one.kind: one.accept_length for one in gate.leaderboard},
        "leaderboard_noises": {one.kind: one.noise for one in gate.leaderboard},
        "leaderboard_steps": {one.kind: one.optimizer_steps for one in gate.leaderboard},
    }
