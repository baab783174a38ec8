"""Calls the weight services: commits sets at their receivers, aborts candidates."""

from __future__ import annotations

from coordinator.calls.base import Calls
from coordinator.machine import commands, events
from coordinator.machine.events import Event
from coordinator.machine.state import Service
from paceline.errors import DataLoss, FailedPrecondition, NotFound, PacelineError
from paceline.telemetry import get_logger
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.weights import abort_version, commit_versions
from paceline.weights.push import COMMAND_DEADLINE_S


async def commit(calls: Calls, command: commands.Commit) -> None:
    """Emits Committed when the gateway serves the set, CommitFailed when it lacks a part or holds a
    damaged one. Nothing waits for the drafter trainer, which is told then.
    """

    def commit_failed(error: PacelineError) -> Event | None:
        if not isinstance(error, DataLoss | FailedPrecondition | NotFound):
            return None
        return events.CommitFailed(calls.now(), command.versions, f"{Service.GATEWAY}: {error}")

    context = calls.context(command)
    with calls.reported(
        Service.GATEWAY, "commit", command, deadline_s=COMMAND_DEADLINE_S, event_of=commit_failed
    ):
        await commit_versions(calls.peers.channels[Service.GATEWAY], context, command.versions)

    calls.emit(events.Committed(calls.now(), command.versions))
    if not calls.config.drafter_enabled:
        return
    try:
        await commit_versions(
            calls.peers.channels[Service.DRAFTER_TRAINER], context, command.versions
        )
    except PacelineError as error:
        calls.went_without(Service.DRAFTER_TRAINER, "commit", error)


async def abort_drafter(calls: Calls, command: commands.AbortDrafter) -> None:
    """Makes the gateway forget a candidate.

    One that stays costs disk until the next commit, nothing else, so a failure is only logged.
    """
    version = command.drafter_version
    channel = calls.peers.channels[Service.GATEWAY]
    try:
        await abort_version(channel, calls.context(command), WEIGHT_TARGET_DRAFTER, version)
    except PacelineError as error:
        log = get_logger("coordinator")
        log.warning("candidate not aborted", drafter_version=version, error=str(error))
