"""Serves DrafterService for the ranks: leases, pushes of promoted drafters, and the spool of heads.
Imports no torch.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import DeadlineExceeded, InvalidInput, PacelineError
from paceline.local.patience import patient
from paceline.messages import from_message, shared_fields
from paceline.models.config import check_model
from paceline.rpc import EPOCHS, EpochGuard, Server, Track, channel, check_run, progress
from paceline.services.drafter_trainer import driver, metrics
from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.telemetry import inject
from paceline.v1 import drafter_pb2 as pb
from paceline.v1 import drafter_pb2_grpc, engine_pb2, progress_pb2, trajectory_pb2
from paceline.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from paceline.weights import SERVICE_NAME as WEIGHT_SERVICE
from paceline.weights import Spool, WeightServicer

SERVICE_NAME = "paceline.v1.DrafterService"
GRACE_S = 5.0
PUSH_GRACE_S = 0.5  # wait of Detached for a push; the next activation reports a later end
SAVE_DEADLINE_S = 30.0
JOIN_S = 30.0


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """DrafterService: one activation at a time, fenced by lease epochs."""

    def __init__(
        self, config: DrafterTrainerConfig, ranks: driver.DrafterDriver, guard: EpochGuard
    ) -> None:
        self._config, self._ranks, self._guard = config, ranks, guard
        self._gateway = channel(config.addresses.gateway, config.security)
        self._promoter = driver.Promoter(self._gateway)
        self._preempted_epoch = 0

    async def Activate(
        self, request: pb.ActivateRequest, context: Any
    ) -> AsyncIterator[pb.ActivateResponse]:
        """Trains until Preempt or the activation's own end; the last response is Detached. If the
        caller disconnects, the activation ends.

        Raises DeadlineExceeded when training has not started in time; the ranks are then stopped or
        killed.
        """
        check_run(request.context, self._config.run.id)
        slots = _checked(request.slots)
        self._guard.check(request.context, Track.DRAFTER)
        epoch = request.context.epoch
        if epoch <= self._preempted_epoch:  # Preempt arrived before its Activate
            yield _detached(
                m.Stopped(epoch, "preempted", total_steps=self._ranks.standing.total_steps)
            )
            return

        command = m.Activate(
            epoch=epoch,
            step=request.context.step,
            drafter_version=request.versions.drafter,
            max_steps=request.max_steps,
            traceparent=inject().get("traceparent", ""),
            round_costs=[from_message(m.RoundCosts, one) for one in request.round_costs],
            accept_lengths=dict(request.accept_lengths),
            slots=slots,
        )
        lease = await self._ranks.begin(command, request.deadline_s)
        try:
            async for response in self._news(lease, request.context):
                yield response
        finally:
            self._ranks.abandon(lease)
            metrics.SLOT_TIME.record(lease.slot_s)

    async def _news(
        self, lease: driver.Lease, context: trajectory_pb2.CommandContext
    ) -> AsyncGenerator[pb.ActivateResponse]:
        """Yields the ranks' news and the results of pushes as they arrive, up to Detached.

        Raises the error that ended the activation, and DeadlineExceeded when training has not
        started in time.
        """
        self._promoter.start_again(context, lease.news)
        left_s = max(0.0, lease.began + lease.deadline_s - time.monotonic())
        until: float | None = asyncio.get_running_loop().time() + left_s
        while True:
            try:
                async with asyncio.timeout_at(until):
                    message = await lease.news.get()
            except TimeoutError as error:
                seen = f"{lease.deadline_s} s"
                raise DeadlineExceeded("training has not begun in time", seen=seen) from error
            match message:
                case PacelineError():
                    raise message
                case m.Attached(world_size):
                    until, attach_s = None, time.monotonic() - lease.began
                    yield pb.ActivateResponse(
                        activated=pb.Activated(attach_s=attach_s, world_size=world_size)
                    )
                case m.Judged(decision="promoted"):
                    self._promoter.start(message, context, lease.news)
                case m.Judged():
                    yield _gate(message)
                case asyncio.Task():
                    if (outcome := self._promoter.collect_outcome()) is not None:
                        yield _gate(outcome)
                case m.Stopped():
                    if self._promoter.push is not None:
                        await asyncio.wait({self._promoter.push}, timeout=PUSH_GRACE_S)
                    if (outcome := self._promoter.collect_outcome()) is not None:
                        yield _gate(outcome)
                    yield _detached(message)
                    return

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        """Adds slots to the activation of the lease; answers when it trains on them. Raises
        FailedPrecondition when the activation is over or stops; these slots are then free too.
        """
        check_run(request.context, self._config.run.id)
        slots, epoch = _checked(request.slots), request.context.epoch
        self._guard.check(request.context, Track.DRAFTER)
        began, deadline_s = time.monotonic(), context.time_remaining() or patient(JOIN_S)
        joined = await self._ranks.join(epoch, slots, deadline_s)
        return pb.JoinResponse(join_s=time.monotonic() - began, world_size=joined.world_size)

    async def Preempt(self, request: pb.PreemptRequest, context: Any) -> pb.PreemptResponse:
        """Returns when the slots are free; a rank that exceeds the deadline is killed. A newer
        command does not fence this call, since freeing slots is always right.
        """
        check_run(request.context, self._config.run.id)
        self._guard.check_proof(request.context, Track.DRAFTER)
        self._preempted_epoch = max(self._preempted_epoch, request.context.epoch)
        lease = self._ranks.lease
        if lease is None or lease.epoch > request.context.epoch:
            return pb.PreemptResponse(was_active=False)
        began, deadline_s = time.monotonic(), context.time_remaining() or patient(driver.PREEMPT_S)
        await self._ranks.stop_lease(lease, deadline_s)
        stopped_after_s = time.monotonic() - began
        metrics.PREEMPTION_LATENCY.record(stopped_after_s)
        return pb.PreemptResponse(stopped_after_s=stopped_after_s, was_active=True)

    async def SaveDrafterCheckpoint(
        self, request: pb.SaveDrafterCheckpointRequest, context: Any
    ) -> pb.SaveDrafterCheckpointResponse:
        """Writes a checkpoint; returns when it is on disk."""
        check_run(request.context, self._config.run.id)
        self._guard.check(request.context, Track.DRAFTER)
        saved = await self._ranks.save(patient(SAVE_DEADLINE_S))
        return pb.SaveDrafterCheckpointResponse(path=saved.path, total_steps=saved.version)

    async def close(self) -> None:
        """Closes the connection to the gateway."""
        self._promoter.cancel()
        await self._gateway.close()


def _checked(slots: Sequence[int]) -> list[int]:
    if not slots or len(set(slots)) < len(slots):
        message = "an activation needs slots, each once"
        raise InvalidInput(message, seen=list(slots), allowed="one or more")
    return sorted(slots)


def _gate(message: m.Judged) -> pb.ActivateResponse:
    figures = shared_fields(message, pb.GateDecision)
    decision = pb.GateDecision(
        promoted=message.decision == "promoted",
        candidate_accept_length=message.candidate,
        serving_accept_length=message.serving,
        **figures,
    )
    return pb.ActivateResponse(gate=decision)


def _detached(message: m.Stopped) -> pb.ActivateResponse:
    return pb.ActivateResponse(detached=pb.Detached(**shared_fields(message, pb.Detached)))


async def serve(config: DrafterTrainerConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set or the ranks cannot start; ends all ranks."""
    check_model(Path(config.model))
    ranks, spool_dir = driver.DrafterDriver(config), Path(config.run.dir) / "spool-drafter-trainer"
    spool, guard = Spool(spool_dir, keep=4), EpochGuard(config.security, spool_dir / EPOCHS)
    # After a restart, the ranks need the spooled heads and the last serving set.
    for target, version in sorted(spool.spooled()):
        await ranks.send_fact(m.NewHead(version, str(spool.path(target, version))))
    if (serving := spool.sets.serving) is not None:
        await ranks.send_fact(m.Serving(serving.policy, serving.drafter))
    servicer = DrafterServicer(config, ranks, guard)
    weights = WeightServicer(spool, guard, ranks, targets=(engine_pb2.WEIGHT_TARGET_POLICY_HEAD,))
    server = Server(config.addresses.drafter_trainer, config.security)
    server.add(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, servicer, SERVICE_NAME)
    server.add(add_WeightServiceServicer_to_server, weights, WEIGHT_SERVICE)
    progress.add_progress(server, lambda: _progress(ranks))
    try:
        # Within the grace period, the ranks stop a running activation and save all they have
        # learned.
        async with ranks.watched.served(server, SERVICE_NAME, stop, grace_s=GRACE_S):
            pass
    finally:
        await servicer.close()


async def _progress(ranks: driver.DrafterDriver) -> progress_pb2.GetProgressResponse:
    at = ranks.standing
    counts = {"optimiser_steps": at.total_steps, "samples_waiting": at.buffer_samples}
    return progress_pb2.GetProgressResponse(parts=ranks.watched.parts(counts))
