"""Calls the gateways about workers: their memory, reclaims for waiting callers, and the paths that
they may not use.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any

from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.local.news import tell_supervisor
from paceline.local.patience import patient
from paceline.rpc import leased, leases, rpc_errors
from paceline.services.coordinator.calls.base import Calls, each, log
from paceline.services.coordinator.calls.gateways import ask_all, by_gateway
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.settings import Schedule
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Phase, Service
from paceline.trajectory import PLAIN_PATH
from paceline.v1 import policy_pb2, rollout_pb2
from paceline.v1.trajectory_pb2 import CommandContext

RESUME_DEADLINE_S = 300.0
"""Long enough for workers to read the weights again."""
_LEAVE_STILL_S = 60.0
"""Seconds without progress after which the wait for the policy trainer's step ends."""


async def release(
    calls: Calls,
    command: commands.ActivateDrafter | commands.JoinDrafter | commands.TrainPolicy,
    slots: Iterable[int],
    holder: Holder,
    what: str,
    *,
    deadline_s: float,
    event_of: Callable[[PacelineError], events.Event | None] | None = None,
) -> None:
    """Frees the memory of the workers on these slots before `holder` gets the slots; emits
    WorkersReleased.
    """
    settings = calls.state().settings
    of_engine = [slot for slot in slots if slot < settings.engine_slots]
    if not of_engine:
        return  # the policy has its own slots
    workers = sorted({slot // settings.slots_per_worker for slot in of_engine})
    # A drafter leaves when its caller is gone; a policy step may last `deadline_s` without a
    # listener.
    outlasts_s = deadline_s if holder is Holder.POLICY else 0.0
    context, rollouts = calls.context(command), calls.peers.rollouts
    # Rollouts that resume later from their tokens need no drain.
    resumes = holder is Holder.POLICY and settings.schedule is not Schedule.SYNC
    drain_s = 0.0 if resumes else None
    requests = {
        number: rollout_pb2.ReleaseWorkersRequest(
            context=context, workers=own, outlasts_s=outlasts_s, drain_s=drain_s
        )
        for number, own in by_gateway(workers, calls.workers_of_each).items()
    }
    asked_s = calls.now()
    with (
        calls.reported(Service.GATEWAY, what, command, deadline_s=deadline_s, event_of=event_of),
        rpc_errors(),
    ):
        async with asyncio.timeout(deadline_s), calls.handing_over:
            answers = await each(
                rollouts[number].ReleaseWorkers(request, timeout=deadline_s)
                for number, request in requests.items()
            )
    at_s, freed = calls.now(), sum(sum(one.released_bytes.values()) for one in answers)
    figures = {"workers": tuple(workers), "bytes": freed, "release_s": at_s - asked_s}
    calls.emit(events.WorkersReleased(at_s, command.epoch, holder, figures))


async def resume(calls: Calls, command: commands.StepCommand) -> None:
    """Returns all slots to the engine; its workers load their gateway's serving set."""
    request = rollout_pb2.ResumeWorkersRequest(context=calls.context(command))
    await ask_all(calls, "ResumeWorkers", request, RESUME_DEADLINE_S)


async def resume_workers(calls: Calls, command: commands.ResumeWorkers) -> None:
    """Resumes lent and suspended workers; emits only failures."""
    with calls.reported(Service.GATEWAY, "resume", command, deadline_s=RESUME_DEADLINE_S):
        async with calls.handing_over:
            await resume(calls, command)


async def give_back(calls: Calls, step: int, epoch: int) -> None:
    """Resumes lent workers that no lease needs during these rollouts or in a pause.

    The call has the epoch of the ended lease, so the gateway rejects it once a newer lease exists.
    """
    if not calls.state().phases & {Phase.ROLLOUT, Phase.PAUSED}:
        return
    try:
        await resume(calls, commands.StepCommand(step, epoch))
    except PacelineError as error:
        log.info("workers stay lent out for now", error=str(error))


async def hand_back(calls: Calls, command: commands.HandBack) -> None:
    """After a failed run, makes the trainers leave their slots and returns the slots to the engine.

    If a trainer does not answer, the workers stay lent only if that trainer may still compute
    there.
    """
    config, peers = calls.config, calls.peers
    try:
        if command.drafter_epoch:
            lease = leased(config.security, config.run.id, command.step, command.drafter_epoch)
            with suppress(Unavailable, DeadlineExceeded):  # then the trainer kills its ranks
                await leases.request_preemption(
                    peers.drafter_trainer, lease, patient(leases.PREEMPT_S)
                )
        if command.policy:
            save = policy_pb2.SavePolicyCheckpointRequest(context=calls.context(command))
            with suppress(Unavailable):  # answers after its running step
                await peers.save_policy(save, patient(_LEAVE_STILL_S))
        await resume(calls, command)
    except PacelineError as error:
        log.error("workers stay lent out until the run is resumed", error=str(error))


_PAUSE_S = 1.0
"""Seconds between two calls, so that a gateway that rejects calls is not flooded."""


async def listen(calls: Calls) -> None:
    """Subscribes to all gateways for ever, across their restarts."""
    await asyncio.gather(*(_listen_on(calls, one) for one in calls.peers.gateways))


async def _listen_on(calls: Calls, gateway: Any) -> None:
    while True:
        try:
            async with aclosing(leases.waiting_traffic(gateway)) as news:
                async for waiting in news:
                    await _reclaim(calls, waiting)
        except PacelineError as error:
            log.debug("the gateway does not answer", error=str(error))
        await asyncio.sleep(_PAUSE_S)


async def _reclaim(calls: Calls, waiting: rollout_pb2.WatchTrafficResponse) -> None:
    """Serves callers that wait for lent workers: ends the drafter's lease, or resumes workers
    without a holder at once.
    """
    state = calls.state()
    if state.lease is None:
        await give_back(calls, state.step, waiting.epoch)
    elif state.lease.epoch == waiting.epoch:
        calls.emit(events.TrafficWaits(calls.now(), waiting.epoch, waiting.requests))


_QUARANTINE_S = 30.0


def report_inexact_paths(calls: Calls, epoch: int, stepped: policy_pb2.PolicyStepped) -> None:
    """Logs and reports the paths beyond their bounds, if any, and emits PathsBeyondBound."""
    if not stepped.beyond:
        return
    details: dict[str, events.Figure] = {}
    for one in stepped.beyond:
        measured = ("tokens", "mean", "upper", "mean_bound", "upper_bound")
        figures = {name: getattr(one, name) for name in measured}
        details[one.path] = figures
        log.error("inexact_path", path=one.path, **figures)
        follows = "nothing is left to turn off" if one.path == PLAIN_PATH else "it is quarantined"
        tell_supervisor(
            "impaired",
            f"the audit found {one.path} inexact: mean gap {one.mean:.2g} nats (bound "
            f"{one.mean_bound:.2g}), 99th percentile {one.upper:.2g} (bound {one.upper_bound:.2g}) "
            f"over {one.tokens} tokens; {follows}, the run goes on",
        )
    paths = tuple(one.path for one in stepped.beyond)
    calls.emit(events.PathsBeyondBound(calls.now(), epoch, paths, details))


async def quarantine(calls: Calls, command: commands.Quarantine) -> None:
    """Applies the quarantine at once if the gateway answers; otherwise the next rollouts start with
    it.
    """
    try:
        await withhold(calls, calls.context(command))
    except PacelineError as error:
        log.error("the quarantine waits for the next rollouts", error=str(error))


async def withhold(calls: Calls, context: CommandContext) -> None:
    """Stops all gateways from using the quarantined paths. Raises errors of the call."""
    paths = calls.state().quarantined
    if not paths:
        return
    request = rollout_pb2.QuarantineRequest(context=context, paths=paths)
    answers = await ask_all(calls, "Quarantine", request, _QUARANTINE_S)
    if unmet := sorted({path for answer in answers for path in answer.unmet}):
        log.error("paths_stay", paths=unmet)
