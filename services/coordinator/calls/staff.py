"""Calls the gateway when workers join and leave."""

from __future__ import annotations

from paceline.errors import PacelineError, ResourceExhausted, Unavailable
from paceline.rpc import rpc_errors
from paceline.services.coordinator.calls.base import Calls
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import Service
from paceline.telemetry import get_logger
from paceline.v1 import rollout_pb2


async def add(calls: Calls, command: commands.AddWorkers) -> None:
    """Emits WorkersJoined, and JoinRefused for each that does not start."""

    def refused(error: PacelineError) -> Event | None:
        if isinstance(error, Unavailable | ResourceExhausted):
            return None
        return _refused(calls, command, command.workers, str(error))

    deadline_s = calls.config.step_deadline_s
    request = rollout_pb2.AddWorkersRequest(context=calls.context(command), workers=command.workers)
    with (
        calls.reported(Service.GATEWAY, "add", command, deadline_s=deadline_s, event_of=refused),
        rpc_errors(),
    ):
        answer = await calls.peers.rollout.AddWorkers(request, timeout=deadline_s)
    for worker, message in sorted(answer.failures.items()):
        calls.emit(_refused(calls, command, (worker,), message))
    if answer.workers:
        calls.emit(events.WorkersJoined(calls.now(), command.epoch, tuple(answer.workers)))


async def drain(calls: Calls, command: commands.DrainWorkers) -> None:
    """Emits WorkersLeft."""
    deadline_s = command.drain_s + calls.config.step_deadline_s
    request = rollout_pb2.DrainWorkersRequest(
        context=calls.context(command), workers=command.workers, drain_s=command.drain_s
    )
    with (
        calls.reported(Service.GATEWAY, "drain", command, deadline_s=deadline_s),
        rpc_errors(),
    ):
        await calls.peers.rollout.DrainWorkers(request, timeout=deadline_s)
    calls.emit(events.WorkersLeft(calls.now(), command.epoch, command.workers))


def _refused(
    calls: Calls, command: commands.AddWorkers, workers: tuple[int, ...], message: str
) -> events.JoinRefused:
    get_logger("coordinator").error("workers_do_not_join", workers=workers, error=message)
    return events.JoinRefused(calls.now(), command.epoch, workers, message)
