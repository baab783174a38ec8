"""Calls the rollout gateway for rollouts, evaluations and its version set at the start of a run."""

from collections.abc import Sequence
from dataclasses import replace

from paceline import errors
from paceline.messages import versions_from_proto
from paceline.report.solved import accuracy, pass_figures
from paceline.services.coordinator.calls import base, gateways, slots, trainers, weights
from paceline.services.coordinator.calls.figures import (
    FinishedSamples,
    accept_length,
    pulls,
    rollout_figures,
)
from paceline.services.coordinator.machine import commands, events, schedule, state
from paceline.services.coordinator.machine.events import PASSED, Event, Figure
from paceline.services.coordinator.machine.settings import KEPT, RunSettings, Schedule
from paceline.v1 import rollout_pb2

_QUERY_DEADLINE_S = 30.0


async def run_started(calls: base.Calls) -> events.RunStarted:
    """The RunStarted event, with the workers of all gateways and the set that gateway 0 serves.
    Raises FailedPrecondition without workers.
    """
    settings = await _settings(calls)
    served = (await weights.versions_at_gateways(calls, _QUERY_DEADLINE_S))[0]
    if not settings.workers:
        message = "the gateway has no engine workers"
        raise errors.FailedPrecondition(message, seen=0, allowed="1 or more")
    return events.RunStarted(calls.now(), settings, versions_from_proto(served.versions))


async def run_resumed(calls: base.Calls) -> events.Resumed:
    """The Resumed event. Raises ConfigError when a setting fixed for the run (KEPT) has changed."""
    began, now = calls.state().settings, await _settings(calls)
    changed = [name for name in KEPT if getattr(now, name) != getattr(began, name)]
    if changed:
        seen, kept = (
            ", ".join(f"{KEPT[name]}={getattr(settings, name)}" for name in changed)
            for settings in (now, began)
        )
        message = f"run {calls.config.run.id} has begun with other settings"
        raise errors.ConfigError(message, seen=seen, allowed=f"{kept}, or a run.id of its own")
    return events.Resumed(calls.now(), calls.config.steps)


async def _settings(calls: base.Calls) -> RunSettings:
    """The machine's settings from the present configuration and the gateways' workers. Raises
    ConfigError when the gateways have different numbers of workers.
    """
    request = rollout_pb2.GetStatusRequest()
    found = [
        len(status.workers)
        for status in await gateways.ask_all(calls, "GetStatus", request, _QUERY_DEADLINE_S)
    ]
    if len({*found}) > 1:
        message = "all gateways have equally many workers"
        raise errors.ConfigError(message, seen=found, allowed=found[:1])
    settings = calls.config.machine_settings(sum(found))
    leasable = found[0] if len(found) > 1 else 0
    return replace(settings, leasable_workers=leasable, tasks=calls.source.described)


async def run_tasks(calls: base.Calls, command: commands.RunTasks) -> None:
    """Emits ShareDone for each worker, then TasksFinished; WorkerLost when a worker died. In the
    schedule fully_async it also emits GroupClosed for each group.
    """

    def worker_lost(error: errors.PacelineError) -> Event | None:
        if error.reason != base.WORKER_LOST:
            return None
        worker = int(error.seen) if error.seen and error.seen.isdecimal() else 0
        return events.WorkerLost(calls.now(), command.epoch, worker)

    service, deadline_s = state.Service.GATEWAY, calls.config.step_deadline_s
    epoch, groups = command.epoch, tuple(schedule.bits(command.places))
    with calls.reported(service, "tasks", command, deadline_s=deadline_s):
        request = calls.source.step_request(
            command.step, epoch, command.round, groups, capture=command.capture
        )
    if calls.rolled_out.versions.drafter == command.versions.drafter:
        request.arms.extend(calls.rolled_out.arms)
    places = {task.group_id: task.task_index for task in request.tasks}
    samples = calls.samples.setdefault(command.step, FinishedSamples(request))
    singly = calls.state().settings.schedule is Schedule.FULLY_ASYNC
    with calls.reported(service, "rollout", command, deadline_s=deadline_s, event_of=worker_lost):
        running = await _begin(calls, command, request)
        async for name, answer in running.news():
            now = calls.now()
            match name:
                case "sample":
                    samples.add(answer)
                case "closed" if singly:
                    group, place = answer.group_id, places[answer.group_id]
                    ended = answer.scored_sessions, answer.equal_rewards
                    calls.emit(events.GroupClosed(now, epoch, place, group, *ended))
                case "share":
                    calls.emit(events.ShareDone(now, epoch, answer.worker_index))
                case "finished":
                    above = calls.config.evaluation.solved_above
                    figures = rollout_figures(samples.ordered, answer, above)
                    calls.samples.pop(command.step, None)
                    calls.rolled_out = answer
                    equal = sum(
                        1 << places[group.group_id]
                        for group in answer.closed_groups
                        if group.equal_rewards and group.group_id in places
                    )
                    calls.emit(events.TasksFinished(now, epoch, figures, equal))


async def _begin(
    calls: base.Calls,
    command: commands.RunTasks | commands.Evaluate,
    request: rollout_pb2.RunTasksRequest,
) -> gateways.TaskCalls:
    """Brings weights, quarantine and slots of the gateways to the state of the command, and begins
    the tasks.
    """
    running = gateways.TaskCalls(calls, request)
    async with calls.handing_over:
        await weights.mend(calls, command)
        await slots.withhold(calls, calls.learner_context())
        await slots.resume(calls, command)
        await running.begin()
    return running


async def evaluate(calls: base.Calls, command: commands.Evaluate) -> None:
    """Emits EvaluationDone, without a value when the engine does not support the probe's arm."""

    def not_made(error: errors.PacelineError) -> Event | None:
        cannot = isinstance(error, errors.InvalidInput | errors.MissingCapability | errors.NotFound)
        if command.kind is not state.Evaluation.PROBE or not cannot:
            return None
        reason: dict[str, Figure] = {"reason": str(error)}
        return events.EvaluationDone(calls.now(), command.epoch, command.kind, None, reason)

    service, deadline_s = state.Service.GATEWAY, calls.config.step_deadline_s
    with calls.reported(service, "tasks", command, deadline_s=deadline_s):
        request = calls.source.evaluation_request(command.kind, command.step, command.epoch)
    samples = FinishedSamples(request)
    with calls.reported(service, "evaluate", command, deadline_s=deadline_s, event_of=not_made):
        running = await _begin(calls, command, request)
        async for name, answer in running.news():
            if name == "sample":
                samples.add(answer)
            elif name == "finished":
                done = _evaluation_done(calls, command, samples.ordered, answer)
                best = command.kind is state.Evaluation.ACCURACY and command.step
                if best and done.value is not None:
                    await trainers.keep_if_best(calls, command, done.value)
                calls.emit(done)


def _evaluation_done(
    calls: base.Calls,
    command: commands.Evaluate,
    samples: Sequence[rollout_pb2.SampleFinished],
    finished: rollout_pb2.TasksFinished,
) -> events.EvaluationDone:
    settings, passed = calls.config.evaluation, None
    if command.kind is state.Evaluation.PROBE:
        value = accept_length(finished.speculation) or None
    else:
        value = accuracy(samples, settings.solved_above)
        passed = pass_figures(samples, settings.samples, settings.solved_above)
    figures: dict[str, Figure] = {
        "finished_steps": command.step,
        "samples": len(samples),
        "response_tokens": finished.response_tokens,
        "pulls": pulls(finished.arms),
        "policy_version": finished.versions.policy,
        "drafter_version": finished.versions.drafter,
    }
    if passed:
        figures[PASSED] = passed
    return events.EvaluationDone(calls.now(), command.epoch, command.kind, value, figures)
