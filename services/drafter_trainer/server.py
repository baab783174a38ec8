"""The parent of the ranks: gRPC in front, no torch. Owns leases, promotion pushes and the spool of heads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from drafter_trainer import messages as m
from drafter_trainer.config import DrafterTrainerConfig
from drafter_trainer.publish import push_drafter
from drafter_trainer.ranks import DrafterRanks
from paceline import telemetry
from paceline.errors import PacelineError
from paceline.rpc import EpochGuard, Server, channel
from paceline.telemetry import inject
from paceline.trajectory import VersionSet
from paceline.v1 import drafter_pb2 as pb
from paceline.v1 import drafter_pb2_grpc
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY_HEAD
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import SERVICE_NAME as WEIGHT_SERVICE
from paceline.weights import Spool, WeightServicer, add_weight_service

SERVICE_NAME = "paceline.v1.DrafterService"
GRACE_S = 3.0
SAVE_DEADLINE_S = 30.0

log = telemetry.get_logger("drafter_trainer")


class HeadHooks:
    """New policy heads and serving sets go to the ranks."""

    def __init__(self, ranks: DrafterRanks) -> None:
        self._ranks = ranks

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        """The head's rows may arrive before its commit, so ranks learn it at once."""
        await self._ranks.tell(m.NewHead(version, str(path)))

    async def on_commit(self, versions: VersionSet, mode: int) -> None:
        """What serves now is what the next candidate is judged against."""
        await self._ranks.tell(m.Serving(versions.policy, versions.drafter))

    async def on_abort(self, target: int, version: int) -> None:
        """A head that never serves labels no rows; keeping it is harmless."""


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """DrafterService: one activation at a time, fenced by lease epochs."""

    def __init__(self, config: DrafterTrainerConfig, ranks: DrafterRanks, guard: EpochGuard) -> None:
        self._config, self._ranks, self._guard = config, ranks, guard
        self._gateway = channel(config.addresses.gateway, config.security)
        self._unsent: m.Judged | None = None  # promoted, but the gateway was not reached under that epoch
        self._stopped: dict[int, asyncio.Event] = {}
        self._drafter_version = 0

    async def Activate(self, request: pb.ActivateRequest, context: Any) -> AsyncIterator[pb.ActivateResponse]:
        """Trains until Preempt or the activation's own end; Detached comes last."""
        self._guard.check(request.context)
        epoch = request.context.epoch
        command = m.Activate(
            epoch=epoch,
            step=request.context.step,
            drafter_version=request.versions.drafter,
            max_steps=request.max_steps,
            traceparent=inject().get("traceparent", ""),
        )
        self._stopped = {epoch: asyncio.Event()}
        pushes: list[asyncio.Task[pb.ActivateResponse]] = []
        if self._unsent is not None:
            pushes.append(asyncio.create_task(self._promote(self._unsent, request.context)))
        detached = pb.ActivateResponse()
        try:
            async for message in self._ranks.activate(command):
                match message:
                    case m.Attached():
                        yield _activated(message)
                    case m.Judged(promoted=True):
                        pushes.append(asyncio.create_task(self._promote(message, request.context)))
                    case m.Judged():
                        yield _gate(message, promoted=False)
                    case m.Stopped():
                        detached = _detached(message)
        finally:
            self._stopped[epoch].set()
        for push in pushes:
            yield await push
        yield detached

    async def _promote(self, decision: m.Judged, context: CommandContext) -> pb.ActivateResponse:
        """Pushes a promoted drafter; what the gateway did not take is tried again in the next activation."""
        self._unsent = decision
        try:
            report = await push_drafter(self._gateway, decision, context, self._config.push_deadline_s)
        except PacelineError as error:
            log.warning("promoted drafter not taken yet", version=decision.drafter_version, error=str(error))
            return _gate(decision, promoted=False)
        self._unsent, self._drafter_version = None, decision.drafter_version
        log.info("drafter prepared", version=decision.drafter_version, bytes=report.bytes, seconds=report.push_s)
        return _gate(decision, promoted=True)

    async def Preempt(self, request: pb.PreemptRequest, context: Any) -> pb.PreemptResponse:
        """Returns when the slots are free: a rank that does not stop within the deadline is killed."""
        self._guard.check(request.context)
        started = time.monotonic()
        epoch = self._ranks.epoch
        if not epoch or epoch > request.context.epoch:
            return pb.PreemptResponse(was_active=False)
        await self._ranks.preempt(epoch)
        try:
            async with asyncio.timeout(self._config.preempt_deadline_s):
                await self._stopped[epoch].wait()
        except TimeoutError:
            log.warning("rank did not stop in time and is killed", epoch=epoch)
            await self._ranks.kill()
        return pb.PreemptResponse(stopped_after_s=time.monotonic() - started, was_active=True)

    async def GetDrafterStatus(self, request: pb.GetDrafterStatusRequest, context: Any) -> pb.GetDrafterStatusResponse:
        """Figures of the last activation and the processes."""
        last = self._ranks.last
        return pb.GetDrafterStatusResponse(
            drafter_version=self._drafter_version,
            total_steps=last.total_steps if last else 0,
            total_tokens=last.total_tokens if last else 0,
            buffer_samples=last.buffer_samples if last else 0,
            buffer_bytes=last.buffer_bytes if last else 0,
            active_epoch=self._ranks.epoch,
            lm_head_hashes=last.lm_head_hashes if last else [],
            rank_pids=self._ranks.pids,
        )

    async def SaveDrafterCheckpoint(
        self, request: pb.SaveDrafterCheckpointRequest, context: Any
    ) -> pb.SaveDrafterCheckpointResponse:
        """Returns when the checkpoint is on disk."""
        self._guard.check(request.context)
        saved = await self._ranks.save(SAVE_DEADLINE_S)
        return pb.SaveDrafterCheckpointResponse(path=saved.path, total_steps=saved.total_steps)

    async def close(self) -> None:
        """Ends the connection to the gateway."""
        await self._gateway.close()


def _activated(message: m.Attached) -> pb.ActivateResponse:
    return pb.ActivateResponse(activated=pb.Activated(attach_s=message.attach_s, world_size=message.world_size))


def _gate(message: m.Judged, *, promoted: bool) -> pb.ActivateResponse:
    return pb.ActivateResponse(
        gate=pb.GateDecision(
            drafter_version=message.drafter_version,
            promoted=promoted,
            candidate_accept_length=message.candidate,
            serving_accept_length=message.serving,
            noise=message.noise,
            policy_version=message.policy_version,
            positions=message.positions,
            optimizer_steps=message.optimizer_steps,
        )
    )


def _detached(message: m.Stopped) -> pb.ActivateResponse:
    return pb.ActivateResponse(
        detached=pb.Detached(
            reason=message.reason,
            steps=message.steps,
            micro_batches=message.micro_batches,
            tokens=message.tokens,
            loss=message.loss,
            busy_s=message.busy_s,
            total_steps=message.total_steps,
            dropped=message.dropped,
        )
    )


async def serve(config: DrafterTrainerConfig, stop: asyncio.Event) -> None:
    """Ranks first, then the port: a healthy service can train at once."""
    run_dir = Path(config.run.dir)
    ranks = DrafterRanks(config, config_argv(config))
    guard = EpochGuard()
    spool = Spool(run_dir / "spool-drafter-trainer", keep=4)
    servicer = DrafterServicer(config, ranks, guard)
    weights = WeightServicer(spool, guard, HeadHooks(ranks), targets=(WEIGHT_TARGET_POLICY_HEAD,))
    server = Server(config.addresses.drafter_trainer, config.security)
    server.add(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, servicer, SERVICE_NAME)
    server.add(add_weight_service, weights, WEIGHT_SERVICE)
    try:
        await ranks.start()
        await _tell_spooled(spool, ranks)
        await server.start()
        log.info("drafter trainer serves", address=config.addresses.drafter_trainer, pid=os.getpid(), ranks=ranks.pids)
        await stop.wait()
    finally:
        await server.stop(GRACE_S)
        await ranks.stop()
        await servicer.close()


async def _tell_spooled(spool: Spool, ranks: DrafterRanks) -> None:
    """After a restart: the heads and the set that served before."""
    for target, version in sorted(spool.spooled()):
        await ranks.tell(m.NewHead(version, str(spool.path(target, version))))
    if spool.serving is not None:
        await ranks.tell(m.Serving(spool.serving.policy, spool.serving.drafter))


def config_argv(config: DrafterTrainerConfig) -> list[str]:
    """The whole config as one JSON argument for the ranks."""
    return [config.model_dump_json()]
