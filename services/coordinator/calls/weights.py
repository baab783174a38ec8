"""Calls the weight services: commits sets at their receivers, aborts candidates, and repairs
damaged sets.
"""

import asyncio
from collections.abc import Mapping, Sequence

from paceline.errors import PacelineError
from paceline.local.patience import patient
from paceline.messages import versions_from_proto
from paceline.rpc import rpc_errors
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.calls.base import Calls, each, log
from paceline.services.coordinator.calls.gateways import by_gateway
from paceline.services.coordinator.calls.trainers import push_again
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import Schedule
from paceline.services.coordinator.machine.state import Service
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import GetVersionsRequest, GetVersionsResponse
from paceline.weights import REFUSALS, abort_version, commit_versions
from paceline.weights.push import COMMAND_DEADLINE_S


async def versions_at_gateways(calls: Calls, deadline_s: float) -> list[GetVersionsResponse]:
    """Each gateway's serving set and its damaged parts. Raises PacelineErrors."""
    with rpc_errors():
        request, stubs = GetVersionsRequest(), calls.peers.weights
        return await each(stub.GetVersions(request, timeout=deadline_s) for stub in stubs)


async def mend(calls: Calls, command: commands.RunTasks | commands.Evaluate) -> None:
    """Makes all gateways serve the command's set, or the set of a newer commit, even after damage
    to their files. A refused set that a gateway kept is not of a newer commit.

    The trainer pushes a damaged policy again. Workers leave out a damaged drafter, and its
    predecessor serves from the next commit.
    """
    versions, before = command.versions, calls.state()
    found = await versions_at_gateways(calls, calls.config.step_deadline_s)
    newer = {one for state in (before, calls.state()) for one in (state.versions, state.committing)}
    damaged_parts = {part for one in found for part in one.damaged}
    overlaps = calls.state().settings.schedule is Schedule.FULLY_ASYNC
    unknown = [
        number
        for number, served in enumerate(versions_from_proto(one.versions) for one in found)
        if served != versions and not (overlaps and served in newer and served.seq > versions.seq)
    ]
    if engine_pb2.WEIGHT_TARGET_DRAFTER in damaged_parts:
        damaged: dict[str, events.Figure] = {"reason": "damaged in the spool"}
        calls.emit(events.AcceptanceFell(calls.now(), versions.drafter, damaged))
    if versions.policy and (unknown or engine_pb2.WEIGHT_TARGET_POLICY in damaged_parts):
        log.warning("policy_pushed_again", version=versions.policy)
        await push_again(calls, command)
    if unknown:
        log.warning("set_committed_again", seq=versions.seq)
        await _serve_one_by_one(calls, unknown, calls.learner_context(), versions)


async def _serve_one_by_one(
    calls: Calls,
    numbers: Sequence[int],
    context: CommandContext,
    versions: VersionSet,
    mode: int = engine_pb2.PAUSE_MODE_IN_PLACE,
    leased: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Makes gateways serve a set: the first one judges it, then the others follow at once. If a
    gateway refuses it, those that took it return to the run's set, and the refusal is raised.

    Workers may have to load a set, so a wait lasts as long as they make progress. `leased`: own
    workers by gateway.
    """

    async def serve(
        number: int, judge: bool | None, versions: VersionSet = versions, mode: int = mode
    ) -> None:
        gateway, own = calls.peers.gateways[number], (leased or {}).get(number, ())
        async with while_moving(gateway, patient(COMMAND_DEADLINE_S)) as timeout:
            await commit_versions(
                gateway, context, versions, mode, leased=own, judge=judge, deadline_s=timeout
            )

    first, *rest = numbers
    await serve(first, True if len(calls.peers.gateways) > 1 else None)
    found = await asyncio.gather(*(serve(number, False) for number in rest), return_exceptions=True)
    failures = [one for one in found if isinstance(one, BaseException)]
    if refusals := [one for one in failures if isinstance(one, REFUSALS)]:
        took = [first, *(number for number, one in zip(rest, found, strict=True) if one is None)]
        former, in_place = calls.state().versions, engine_pb2.PAUSE_MODE_IN_PLACE
        try:
            await each(serve(number, False, former, in_place) for number in took)
        except PacelineError as error:  # the next rollouts commit the run's set again
            log.error("a refused set still serves at a gateway", error=str(error))
        failures = [*refusals]
    for failure in failures:
        raise failure


async def commit(calls: Calls, command: commands.Commit) -> None:
    """Emits Committed when all gateways serve the set, CommitFailed when a part is missing or
    damaged. The drafter trainer is notified afterwards; no phase waits for its answer.
    """

    def commit_failed(error: PacelineError) -> Event | None:
        if not isinstance(error, REFUSALS):
            return None
        refused = command.versions
        log.warning("set_refused", seq=refused.seq, drafter=refused.drafter, error=str(error))
        return events.CommitFailed(calls.now(), command.versions, f"{Service.GATEWAY}: {error}")

    context, deadline_s = calls.context(command), patient(COMMAND_DEADLINE_S)
    with calls.reported(
        Service.GATEWAY, "commit", command, deadline_s=deadline_s, event_of=commit_failed
    ):
        mode = engine_pb2.PauseMode.Value(f"PAUSE_MODE_{calls.state().commit_mode.upper()}")
        leased = by_gateway(command.leased, calls.workers_of_each)
        # The first gateway judges the set, with a worker that is free.
        numbers = sorted(
            range(len(calls.peers.gateways)),
            key=lambda number: len(leased.get(number, ())) == calls.workers_of_each,
        )
        await _serve_one_by_one(calls, numbers, context, command.versions, mode, leased)

    calls.emit(events.Committed(calls.now(), command.versions))
    if not calls.config.drafter_enabled:
        return
    try:
        await commit_versions(calls.peers.drafter_trainer, context, command.versions)
    except PacelineError as error:
        calls.went_without(Service.DRAFTER_TRAINER, "commit", error)


async def abort_drafter(calls: Calls, command: commands.AbortDrafter) -> None:
    """Drops a prepared drafter candidate at the gateways.

    A remaining candidate only costs disk space until the next commit, so a failure is only logged.
    """
    version, context = command.drafter_version, calls.context(command)
    gateway = calls.peers.gateways[0]  # the first gateway passes the call on
    try:
        await abort_version(gateway, context, engine_pb2.WEIGHT_TARGET_DRAFTER, version)
    except PacelineError as error:
        log.warning("candidate not aborted", drafter_version=version, error=str(error))
