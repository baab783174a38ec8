"""The gRPC calls behind the commands, one coroutine each; their answers become events.

Owns requests, deadlines and what an answer means. Does not decide what follows a failure: errors of
paceline.errors pass through to the executor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.calls.figures import (
    Samples,
    accept_length,
    accuracy,
    gate_figures,
    pulls,
    rollout_figures,
    round_costs,
)
from coordinator.calls.groups import ClosedGroups
from coordinator.calls.peers import Peers
from coordinator.calls.tasks import TaskSource
from coordinator.config import CoordinatorConfig
from coordinator.machine import commands, events
from coordinator.machine.events import Event, Figure
from coordinator.machine.state import Evaluation, Service
from paceline.errors import DeadlineExceeded, InvalidInput, MissingCapability, NotFound, Unavailable
from paceline.messages import versions_to_proto
from paceline.rpc import responses, rpc_errors
from paceline.v1 import drafter_pb2, policy_pb2, rollout_pb2
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import abort_version, commit_versions

COMMIT_DEADLINE_S = 60.0
CHECKPOINT_DEADLINE_S = 300.0
Emit = Callable[[Event], None]


@dataclass(slots=True)
class Calls:
    """Makes the calls of one run."""

    config: CoordinatorConfig
    peers: Peers
    source: TaskSource
    emit: Emit
    clock: Callable[[], float]
    groups: ClosedGroups
    _samples: tuple[int, Samples] | None = None
    _round_costs: dict[str, float] = field(default_factory=dict)  # of the last rollouts, by arm

    def context(self, step: int, epoch: int) -> CommandContext:
        """What every command carries."""
        return CommandContext(run_id=self.config.run.id, step=step, epoch=epoch)

    async def run_tasks(self, command: commands.RunTasks) -> None:
        """ShareDone for each worker, then TasksFinished."""
        request = self.source.step_request(command.step, command.epoch)
        if self._samples is None or self._samples[0] != command.step:
            self._samples = (command.step, Samples(request))
        samples = self._samples[1]
        with rpc_errors():
            async for response in responses(
                self.peers.rollout.RunTasks(request, timeout=self.config.step_deadline_s)
            ):
                match response.WhichOneof("event"):
                    case "sample":
                        samples.add(response.sample)
                    case "share":
                        self.emit(
                            events.ShareDone(
                                self.clock(), command.epoch, response.share.worker_index
                            )
                        )
                    case "finished":
                        figures = rollout_figures(samples.ordered, response.finished)
                        self._round_costs = round_costs(response.finished.arms)
                        self.emit(events.TasksFinished(self.clock(), command.epoch, figures))
                        return
        raise Unavailable(
            "the gateway ended RunTasks before its last message", seen="end of stream"
        )

    async def evaluate(self, command: commands.Evaluate) -> None:
        """EvaluationDone; without a value when the engine cannot draft with the probe's arm."""
        try:
            samples, finished = await self._run_evaluation(command)
        except (InvalidInput, MissingCapability, NotFound) as error:
            if command.kind is not Evaluation.PROBE:
                raise
            missing: dict[str, Figure] = {"reason": str(error)}
            self.emit(
                events.EvaluationDone(self.clock(), command.epoch, command.kind, None, missing)
            )
            return
        value: float | None = accuracy(samples.ordered)
        if command.kind is Evaluation.PROBE:
            value = accept_length(finished.speculation) or None
        figures: dict[str, Figure] = {
            "finished_steps": command.step,
            "samples": len(samples.ordered),
            "response_tokens": finished.response_tokens,
            "pulls": pulls(finished.arms),
            "policy_version": finished.versions.policy,
            "drafter_version": finished.versions.drafter,
        }
        self.emit(events.EvaluationDone(self.clock(), command.epoch, command.kind, value, figures))

    async def _run_evaluation(
        self, command: commands.Evaluate
    ) -> tuple[Samples, rollout_pb2.TasksFinished]:
        request = self.source.evaluation_request(command.kind, command.step, command.epoch)
        samples = Samples(request)
        with rpc_errors():
            async for response in responses(
                self.peers.rollout.RunTasks(request, timeout=self.config.step_deadline_s)
            ):
                match response.WhichOneof("event"):
                    case "sample":
                        samples.add(response.sample)
                    case "finished":
                        return samples, response.finished
        raise Unavailable(
            "the gateway ended RunTasks before its last message", seen="end of stream"
        )

    async def activate(self, command: commands.ActivateDrafter) -> None:
        """DrafterActivated, GatePromoted or GateDecided for each decision, Detached.

        TimeoutError when training does not begin.
        """
        request = drafter_pb2.ActivateRequest(
            context=self.context(command.step, command.epoch),
            slots=command.slots,
            deadline_s=command.deadline_s,
            versions=versions_to_proto(command.versions),
            max_steps=self.config.max_drafter_steps,
            round_costs=self._round_costs,
        )
        async with asyncio.timeout(command.deadline_s) as until_activated:
            with rpc_errors():
                async for response in responses(
                    self.peers.drafter.Activate(request, timeout=self.config.step_deadline_s)
                ):
                    if response.WhichOneof("event") == "activated":
                        until_activated.reschedule(None)
                    self._emit_activation(command.epoch, response)
                    if response.HasField("detached"):
                        return
        raise Unavailable(
            "the drafter trainer ended Activate before its last message", seen="end of stream"
        )

    def _emit_activation(self, epoch: int, response: drafter_pb2.ActivateResponse) -> None:
        match response.WhichOneof("event"):
            case "activated":
                attached: dict[str, Figure] = {
                    "attach_s": response.activated.attach_s,
                    "world_size": response.activated.world_size,
                }
                self.emit(events.DrafterActivated(self.clock(), epoch, attached))
            case "gate" if response.gate.promoted:
                version, figures = response.gate.drafter_version, gate_figures(response.gate)
                self.emit(events.GatePromoted(self.clock(), epoch, version, figures))
            case "gate":
                gate = response.gate
                figures = gate_figures(gate)
                self.emit(
                    events.GateDecided(
                        self.clock(), epoch, gate.decision, gate.drafter_version, figures
                    )
                )
            case "detached":
                reason, figures = response.detached.reason, _detached_figures(response.detached)
                self.emit(events.Detached(self.clock(), epoch, reason, figures))

    async def preempt(self, command: commands.PreemptDrafter) -> None:
        """Preempted; DeadlineExceeded after the command's seconds: then the trainer itself kills
        its rank.
        """
        request = drafter_pb2.PreemptRequest(context=self.context(command.step, command.epoch))
        with rpc_errors():
            response = await self.peers.drafter.Preempt(request, timeout=command.deadline_s)
        figures: dict[str, Figure] = {
            "stopped_after_s": response.stopped_after_s,
            "was_active": int(response.was_active),
        }
        self.emit(events.Preempted(self.clock(), command.epoch, figures))

    async def train_policy(self, command: commands.TrainPolicy) -> None:
        """PolicyStepped, PolicyPrepared.

        The trainer waits for the groups that closed with the step's rollouts.
        """
        closed = self.groups.of(command.step)
        request = policy_pb2.TrainStepRequest(
            context=self.context(command.step, command.epoch),
            policy_version=command.policy_version,
            groups=[
                policy_pb2.ExpectedGroup(group_id=group, size=size)
                for group, size in closed.items()
            ],
            slots=command.slots,
            group_deadline_s=self.config.group_deadline_s,
        )
        batch: dict[str, Figure] = {}
        with rpc_errors():
            async for response in responses(
                self.peers.policy.TrainStep(request, timeout=self.config.step_deadline_s)
            ):
                match response.WhichOneof("event"):
                    case "batch":
                        batch = {
                            "trajectories": response.batch.trajectories,
                            "batch_tokens": response.batch.tokens,
                            "groups_dropped": sum(response.batch.dropped.values()),
                        }
                    case "stepped":
                        version, figures = (
                            response.stepped.policy_version,
                            batch | _policy_figures(response.stepped),
                        )
                        self.emit(
                            events.PolicyStepped(self.clock(), command.epoch, version, figures)
                        )
                    case "prepared":
                        version = response.prepared.policy_version
                        pushed: dict[str, Figure] = {
                            "push_bytes": response.prepared.bytes,
                            "push_s": response.prepared.push_s,
                        }
                        self.emit(
                            events.PolicyPrepared(self.clock(), command.epoch, version, pushed)
                        )
                        return
        raise Unavailable(
            "the policy trainer ended TrainStep before its last message", seen="end of stream"
        )

    async def commit(self, command: commands.Commit, service: Service) -> None:
        """Serves the set at one receiver; WeightsError when a part is not there."""
        context = self.context(command.step, command.epoch)
        await commit_versions(
            self.peers.channels[service], context, command.versions, deadline_s=COMMIT_DEADLINE_S
        )

    async def abort_drafter(self, command: commands.AbortDrafter) -> None:
        """Makes the gateway forget a candidate."""
        context = self.context(command.step, command.epoch)
        channel = self.peers.channels[Service.GATEWAY]
        await abort_version(channel, context, WEIGHT_TARGET_DRAFTER, command.drafter_version)

    async def save_policy(self, command: commands.SaveCheckpoints) -> str:
        """Path of the policy's checkpoint; empty when no step was trained."""
        if command.step == 0:
            return ""
        request = policy_pb2.SavePolicyCheckpointRequest(
            context=self.context(command.step, command.epoch)
        )
        with rpc_errors():
            response = await self.peers.policy.SavePolicyCheckpoint(
                request, timeout=CHECKPOINT_DEADLINE_S
            )
        return str(response.path)

    async def save_drafter(self, command: commands.SaveCheckpoints) -> str:
        """Path of the drafter's checkpoint; empty when the run trains none."""
        if command.step == 0 or not self.config.drafter_enabled:
            return ""
        request = drafter_pb2.SaveDrafterCheckpointRequest(
            context=self.context(command.step, command.epoch)
        )
        with rpc_errors():
            response = await self.peers.drafter.SaveDrafterCheckpoint(
                request, timeout=CHECKPOINT_DEADLINE_S
            )
        return str(response.path)

    async def gateway_workers(self, deadline_s: float) -> int:
        """Engine workers of the gateway. Raises DeadlineExceeded when it has none."""
        with rpc_errors():
            status = await self.peers.rollout.GetStatus(
                rollout_pb2.GetStatusRequest(), timeout=deadline_s
            )
        if not status.workers:
            raise DeadlineExceeded("the gateway has no engine workers", seen=0, allowed="1 or more")
        return len(status.workers)


def _detached_figures(detached: drafter_pb2.Detached) -> dict[str, Figure]:
    return {
        "steps": detached.steps,
        "micro_batches": detached.micro_batches,
        "tokens": detached.tokens,
        "loss": detached.loss,
        "busy_s": detached.busy_s,
        "total_steps": detached.total_steps,
        "dropped": dict(detached.dropped),
    }


def _policy_figures(stepped: policy_pb2.PolicyStepped) -> dict[str, Figure]:
    names = (
        "loss",
        "grad_norm",
        "reward_mean",
        "reward_std",
        "entropy",
        "behavior_gap",
        "train_s",
        "world_size",
    )
    return {name: getattr(stepped, name) for name in names} | {"batch_hash": stepped.batch_hash}
