"""Calls the policy trainer for one optimiser step and the push of its weights."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from paceline.errors import PacelineError
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.calls import quarantine
from paceline.services.coordinator.calls.base import RANK_LOST, STEP_ORDER, Calls, answers
from paceline.services.coordinator.calls.figures import message_figures
from paceline.services.coordinator.calls.slots import release
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event, Figure
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Service
from paceline.v1 import policy_pb2


async def train(calls: Calls, command: commands.TrainPolicy) -> None:
    """Emits WorkersReleased, PolicyStepped and PolicyPrepared; TrainerFailed when a rank died. The
    trainer waits for the groups that closed with the step's rollouts.
    """

    def rank_lost(error: PacelineError) -> Event | None:
        if error.reason != RANK_LOST:
            return None
        return events.TrainerFailed(calls.now(), command.epoch, Service.POLICY_TRAINER, str(error))

    deadline_s = calls.config.step_deadline_s
    await release(calls, command, command.slots, Holder.POLICY, "policy", deadline_s=deadline_s)
    request = _request(calls, command)
    batch: dict[str, Figure] = {}
    with calls.reported(
        Service.POLICY_TRAINER, "policy", command, deadline_s=deadline_s, event_of=rank_lost
    ):
        async for name, answer in _train_step(calls, request):
            now, epoch = calls.now(), command.epoch
            match name:
                case "batch":
                    batch = _batch_figures(answer)
                case "stepped":
                    figures = batch | message_figures(answer, "policy_version", "beyond")
                    calls.emit(events.PolicyStepped(now, epoch, answer.policy_version, figures))
                    quarantine.found(calls, epoch, answer)
                case "prepared":
                    pushed = {"push_bytes": answer.bytes, "push_s": answer.push_s}
                    calls.emit(events.PolicyPrepared(now, epoch, answer.policy_version, pushed))


async def push_again(calls: Calls, command: commands.RunTasks | commands.Evaluate) -> None:
    """Pushes the serving policy again; a step that is already trained is only pushed. Emits
    SetDamaged when the trainer has moved on to a newer policy.
    """

    def trained_on(error: PacelineError) -> Event | None:
        if error.reason != STEP_ORDER or not isinstance(command, commands.RunTasks):
            return None
        return events.SetDamaged(calls.now(), command.epoch)

    deadline_s = calls.config.step_deadline_s
    request = policy_pb2.TrainStepRequest(
        context=calls.learner_context(),
        policy_version=command.versions.policy - 1,
    )
    with calls.reported(
        Service.POLICY_TRAINER, "push", command, deadline_s=deadline_s, event_of=trained_on
    ):
        async for _ in _train_step(calls, request):
            pass


async def _train_step(
    calls: Calls, request: policy_pb2.TrainStepRequest
) -> AsyncGenerator[tuple[str, Any]]:
    """The answers of a step, while the trainer makes progress."""
    trainer = calls.peers.policy_trainer
    async with while_moving(trainer, calls.config.step_deadline_s) as timeout:
        call = calls.peers.policy.TrainStep(request, timeout=timeout)
        async with aclosing(answers(call, last="prepared")) as found:
            async for one in found:
                yield one


def _request(calls: Calls, command: commands.TrainPolicy) -> policy_pb2.TrainStepRequest:
    return policy_pb2.TrainStepRequest(
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


def _batch_figures(batch: policy_pb2.BatchReady) -> dict[str, Figure]:
    return {
        "trajectories": batch.trajectories,
        "batch_tokens": batch.tokens,
        "groups_dropped": sum(batch.dropped.values()),
        "staleness": dict(sorted(batch.staleness.items(), key=lambda lag: int(lag[0]))),
    }
