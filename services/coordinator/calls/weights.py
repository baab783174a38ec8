"""Calls the weight services: commits sets at their receivers, aborts candidates, and repairs
damaged sets.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import DataLoss, FailedPrecondition, NotFound, PacelineError
from paceline.local.patience import patient
from paceline.messages import versions_from_proto
from paceline.rpc import rpc_errors
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.calls.base import Calls
from paceline.services.coordinator.calls.policy_trainer import push_again
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import Schedule
from paceline.services.coordinator.machine.state import Service
from paceline.telemetry import get_logger
from paceline.v1.engine_pb2 import (
    WEIGHT_TARGET_DRAFTER,
    WEIGHT_TARGET_POLICY,
    PauseMode,
)
from paceline.v1.weights_pb2 import GetVersionsRequest, GetVersionsResponse
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights import abort_version, commit_versions
from paceline.weights.push import COMMAND_DEADLINE_S


async def versions_at_gateway(calls: Calls, deadline_s: float) -> GetVersionsResponse:
    """The gateway's serving set and its damaged parts. Raises PacelineErrors."""
    stub: Any = WeightServiceStub(calls.peers.channels[Service.GATEWAY])  # type: ignore[no-untyped-call]
    with rpc_errors():
        found: GetVersionsResponse = await stub.GetVersions(
            GetVersionsRequest(), timeout=deadline_s
        )
    return found


async def mend(calls: Calls, command: commands.RunTasks | commands.Evaluate) -> None:
    """Makes the gateway serve the command's set, or a newer set committed meanwhile, even after
    damage to its files.

    The trainer pushes a damaged policy again. Workers leave out a damaged drafter, and its
    predecessor serves from the next commit.
    """
    versions = command.versions
    found = await versions_at_gateway(calls, calls.config.step_deadline_s)
    served, state = versions_from_proto(found.versions), calls.state()
    overlaps = state.settings.schedule is Schedule.FULLY_ASYNC
    unknown = served != versions and not (overlaps and served.seq > versions.seq)
    if WEIGHT_TARGET_DRAFTER in found.damaged:
        damaged: dict[str, events.Figure] = {"reason": "damaged in the spool"}
        calls.emit(events.AcceptanceFell(calls.now(), versions.drafter, damaged))
    if versions.policy and (unknown or WEIGHT_TARGET_POLICY in found.damaged):
        get_logger("coordinator").warning("policy_pushed_again", version=versions.policy)
        await push_again(calls, command)
    if unknown:
        get_logger("coordinator").warning("set_committed_again", seq=versions.seq)
        gateway, context = calls.peers.channels[Service.GATEWAY], calls.learner_context()
        async with while_moving(gateway, patient(COMMAND_DEADLINE_S)) as timeout:
            await commit_versions(gateway, context, versions, deadline_s=timeout)


async def commit(calls: Calls, command: commands.Commit) -> None:
    """Emits Committed when the gateway serves the set, CommitFailed when a part is missing or
    damaged. The drafter trainer is notified afterwards; no phase waits for its answer.
    """

    def commit_failed(error: PacelineError) -> Event | None:
        if not isinstance(error, DataLoss | FailedPrecondition | NotFound):
            return None
        refused, log = command.versions, get_logger("coordinator")
        log.warning("set_refused", seq=refused.seq, drafter=refused.drafter, error=str(error))
        return events.CommitFailed(calls.now(), command.versions, f"{Service.GATEWAY}: {error}")

    context, deadline_s = calls.context(command), patient(COMMAND_DEADLINE_S)
    with calls.reported(
        Service.GATEWAY, "commit", command, deadline_s=deadline_s, event_of=commit_failed
    ):
        mode = PauseMode.Value(f"PAUSE_MODE_{calls.state().commit_mode.upper()}")
        gateway, leased = calls.peers.channels[Service.GATEWAY], command.leased
        # Workers may have to load the set, so the wait lasts as long as they make progress.
        async with while_moving(gateway, deadline_s) as timeout:
            await commit_versions(
                gateway, context, command.versions, mode, leased=leased, deadline_s=timeout
            )

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
    """Drops a prepared drafter candidate at the gateway.

    A remaining candidate only costs disk space until the next commit, so a failure is only logged.
    """
    version = command.drafter_version
    channel = calls.peers.channels[Service.GATEWAY]
    try:
        await abort_version(channel, calls.context(command), WEIGHT_TARGET_DRAFTER, version)
    except PacelineError as error:
        log = get_logger("coordinator")
        log.warning("candidate not aborted", drafter_version=version, error=str(error))
