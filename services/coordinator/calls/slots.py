"""Calls the gateway when slots change hands: workers give their memory back, or take it again."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.calls.base import Calls, no_event
from coordinator.machine import commands, events
from coordinator.machine.commands import StepCommand
from coordinator.machine.events import Event
from coordinator.machine.state import Holder, Service
from paceline.errors import PacelineError
from paceline.rpc import rpc_errors
from paceline.v1 import rollout_pb2

_RESUME_DEADLINE_S = 300.0
"""Weights may have to be read again."""


async def release(
    calls: Calls,
    command: commands.ActivateDrafter | commands.TrainPolicy,
    holder: Holder,
    what: str,
    *,
    deadline_s: float,
    event_of: Callable[[PacelineError], Event | None] = no_event,
) -> None:
    """Has the workers on the command's slots give their memory back, before `holder` gets the
    slots; emits WorkersReleased.
    """
    workers = sorted({slot // calls.config.slots_per_worker for slot in command.slots})
    request = rollout_pb2.ReleaseWorkersRequest(context=calls.context(command), workers=workers)
    asked_s = calls.now()
    with (
        calls.reported(Service.GATEWAY, what, command, deadline_s=deadline_s, event_of=event_of),
        rpc_errors(),
    ):
        answer = await calls.peers.rollout.ReleaseWorkers(request, timeout=deadline_s)
    at_s, freed = calls.now(), answer.released_bytes
    figures = {"workers": tuple(workers), "bytes": sum(freed.values()), "release_s": at_s - asked_s}
    calls.emit(events.WorkersReleased(at_s, command.epoch, holder, figures))


async def resume(calls: Calls, command: StepCommand) -> None:
    """Gives the engine all its slots back: its workers serve what the gateway serves."""
    request = rollout_pb2.ResumeWorkersRequest(context=calls.context(command))
    with rpc_errors():
        await calls.peers.rollout.ResumeWorkers(request, timeout=_RESUME_DEADLINE_S)
