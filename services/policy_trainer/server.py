"""Serves PolicyService for the ranks: commands, fencing, start and stop. Imports no torch."""

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from paceline import errors
from paceline.addresses import is_loopback
from paceline.local import processes, services
from paceline.messages import shared_fields, to_message
from paceline.models.config import check_model
from paceline.ranks import messages, watched
from paceline.ranks.group import RankGroup, Span
from paceline.ranks.hosting import host_ranks
from paceline.rpc import EPOCHS, EpochGuard, Server, Track, channel, check_run
from paceline.rpc.progress import add_progress
from paceline.services.policy_trainer import messages as m
from paceline.services.policy_trainer.algorithms import check_algorithm
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.telemetry import get_logger, inject
from paceline.v1 import policy_pb2 as pb
from paceline.v1 import policy_pb2_grpc, progress_pb2, trajectory_pb2

_log = get_logger(__name__)


SERVICE_NAME = "paceline.v1.PolicyService"
STOP_GRACE_S = 20.0  # time of a clean stop with the last checkpoint; orchestrators kill after 30 s
_LAST: dict[type[m.Command], type[m.News]] = {m.Train: m.Pushed, m.Learn: m.Learned}
RANK_GRACE_S = 3.0  # until a rank is killed: longer than telemetry.shutdown takes


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """Runs one command of the ranks at a time, and turns their news into responses."""

    def __init__(self, config: PolicyTrainerConfig) -> None:
        self._config = config
        self._guard = EpochGuard(config.security, Path(config.run.dir) / "policy" / EPOCHS)
        self._progress = m.Progress()
        self.ranks = watched.WatchedRanks[m.Message](
            rank_group(config),
            m.MESSAGES,
            service="policy_trainer",
            start_deadline_s=config.start_deadline_s,
            on_message=self._receive,
        )
        self._turn = asyncio.Lock()

    async def TrainStep(
        self, request: pb.TrainStepRequest, context: Any
    ) -> AsyncIterator[pb.TrainStepResponse]:
        """Sends BatchReady, PolicyStepped and PolicyPrepared. Raises FailedPrecondition for fewer
        slots than ranks.
        """
        slots, ranks = len(request.slots), self.ranks.group.world_size
        if slots and slots < ranks:
            message = "each rank of the policy needs a leased slot; set policy_trainer.ranks"
            seen, allowed = f"{slots} slots", f"{ranks} or more"
            raise errors.FailedPrecondition(message, seen=seen, allowed=allowed)
        self._check(request.context)
        deadline_s = self._config.step_deadline_s
        wanted = m.Wanted(
            step=request.context.step,
            policy_version=request.policy_version,
            groups=tuple((group.group_id, group.size) for group in request.groups),
            deadline_s=min(request.group_deadline_s, deadline_s),
            left_out=frozenset(group.group_id for group in request.groups if group.left_out),
        )
        command = m.Train(wanted, json_format.MessageToJson(request.context), inject())
        async for news in self._run(command, request.group_deadline_s + deadline_s):
            yield _response(news)

    async def SavePolicyCheckpoint(
        self, request: pb.SavePolicyCheckpointRequest, context: Any
    ) -> pb.SavePolicyCheckpointResponse:
        """Writes a checkpoint, with an evaluation only if it is the best so far. Raises
        InvalidInput for an evaluation that is not a number.
        """
        self._check(request.context)
        command = m.Keep(request.evaluation) if request.HasField("evaluation") else None
        if command is not None and not math.isfinite(command.evaluation):
            raise errors.InvalidInput("an evaluation is a number", seen=command.evaluation)
        saved = await self._save(self._config.step_deadline_s, command)
        return pb.SavePolicyCheckpointResponse(path=saved.path, policy_version=saved.version)

    async def Learn(
        self, request: pb.LearnRequest, context: Any
    ) -> AsyncIterator[pb.LearnResponse]:
        """Sends the answer to an order. Raises as Orders.run."""
        self._check(request.context)
        command = m.Learn(json_format.MessageToJson(request))
        async for news in self._run(command, self._config.step_deadline_s):
            if isinstance(news, m.Learned):
                yield json_format.Parse(news.answer, pb.LearnResponse())

    def KeepRanks(
        self, request_iterator: AsyncIterator[pb.KeepRanksRequest], context: Any
    ) -> AsyncIterator[pb.KeepRanksResponse]:
        """Keeps ranks on another node, as RankHosts.orders."""
        return self.ranks.group.hosts.orders(request_iterator, self._config.run.id)

    def _check(self, context: trajectory_pb2.CommandContext) -> None:
        check_run(context, self._config.run.id)
        self._guard.check(context, Track.LEARNER)

    async def _run(self, command: m.Command, deadline_s: float) -> AsyncIterator[m.News]:
        """Sends a command and yields its news up to the last.

        Raises the errors of WatchedRanks.run. On DeadlineExceeded the ranks are killed, because
        their state is unknown.
        """
        last = _LAST.get(type(command), messages.Saved)
        async with self._turn:
            await self.ranks.wait_ready(self._config.start_deadline_s)
            try:
                async for news in self.ranks.run(command, last, deadline_s):
                    yield news
            except errors.DeadlineExceeded:
                self.ranks.group.kill()
                raise

    async def _save(
        self, deadline_s: float, command: messages.Save | m.Keep | None = None
    ) -> messages.Saved:
        """Writes a checkpoint, or sends an evaluation of the present weights; returns the report of
        that checkpoint, or of the checkpoint with the best evaluation.
        """
        news = self._run(command or messages.Save(), deadline_s)
        return [one async for one in news if isinstance(one, messages.Saved)][-1]

    async def save_last(self, deadline_s: float) -> None:
        """Writes a last checkpoint if there is a newer version, once no command is running. A step
        that is still running after `deadline_s` seconds is abandoned; the next start replays it.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._turn:
                pass
        unsaved = self._progress.policy_version > self._progress.checkpoint_version
        if not (unsaved and self.ranks.ready) or self._turn.locked():
            return
        try:
            saved = await self._save(deadline_s)
            _log.info("final_checkpoint", path=saved.path)
        except errors.PacelineError as error:
            _log.error("final_checkpoint_failed", error=str(error))

    async def progress(self) -> progress_pb2.GetProgressResponse:
        """The progress of the service and its ranks."""
        done = self._progress
        counts = {"step": max(0, done.step), "trained": done.trajectories_trained}
        return progress_pb2.GetProgressResponse(parts=self.ranks.parts(counts))

    def _receive(self, news: m.Message) -> None:
        if isinstance(news, m.Stepped):
            self._progress = news.progress
        elif isinstance(news, messages.Saved):
            # The saved checkpoint may be the best, not the newest.
            newest = max(news.version, self._progress.checkpoint_version)
            self._progress = dataclasses.replace(self._progress, checkpoint_version=newest)


def rank_group(config: PolicyTrainerConfig) -> RankGroup:
    """The ranks of this process's node. Raises ConfigError for ranks on several nodes in a network
    that may be shared.
    """
    nodes, address = config.run.policy_nodes, config.addresses.policy_trainer
    if nodes > 1 and not (is_loopback(address) or config.security.allow_insecure):
        raise errors.ConfigError(
            "torch's links between ranks on several nodes have neither token nor encryption",
            reason="INSECURE_ADDRESS",
            seen=f"run.policy_nodes={nodes}, {address}",
            allowed="security.allow_insecure=true in a private network; token and TLS still apply "
            "to all other links",
        )
    return RankGroup(
        "paceline.services.policy_trainer.rank",
        config.ranks or nodes * min(2, processes.usable_cores()),
        threads_per_rank=config.threads_per_rank,
        log_dir=Path(config.run.dir) / "logs",
        config=config,
        heartbeat_s=config.run.heartbeat_s,
        preload=services.service("policy_trainer").forked,
        span=Span(config.node, nodes, address) if nodes > 1 else None,
    )


async def keep_ranks(config: PolicyTrainerConfig, stop: asyncio.Event) -> None:
    """Keeps the ranks of a further node until `stop` is set."""
    async with (
        rank_group(config) as group,
        channel(config.addresses.policy_trainer, config.security) as to_trainer,
    ):
        stub = policy_pb2_grpc.PolicyServiceStub(to_trainer)
        dial = partial(stub.KeepRanks, wait_for_ready=True)
        await host_ranks(
            group, pb.KeepRanksRequest(run_id=config.run.id, node=config.node), dial, stop
        )


def require_fresh(root: Path, *, resume: bool) -> None:
    """Raises ConfigError when the directory has a run and `resume` is false."""
    if not resume and (root.exists() and any(root.iterdir())):
        message = "a trained policy is there"
        raise errors.ConfigError(message, seen=root, allowed="resume=true, or another run.dir")


async def serve(config: PolicyTrainerConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set or the ranks cannot start; ends all ranks. On a further node of
    the trainer: keeps its ranks.
    """
    if config.node:
        await keep_ranks(config, stop)
        return
    check_model(Path(config.model))
    check_algorithm(config.algorithm.name)
    require_fresh(config.checkpoints_dir, resume=config.resume)
    server = Server(config.addresses.policy_trainer, config.security)
    servicer = PolicyServicer(config)
    server.add(policy_pb2_grpc.add_PolicyServiceServicer_to_server, servicer, SERVICE_NAME)
    add_progress(server, servicer.progress)
    async with servicer.ranks.served(server, SERVICE_NAME, stop, grace_s=RANK_GRACE_S):
        # No new call is accepted while the last checkpoint is written.
        stopping = asyncio.create_task(server.stop(STOP_GRACE_S))
        await servicer.save_last(STOP_GRACE_S / 2)
    await stopping


def _response(news: m.News) -> pb.TrainStepResponse:
    match news:
        case m.Batched(batch=batch):
            ready = pb.BatchReady(**shared_fields(batch, pb.BatchReady))
            return pb.TrainStepResponse(batch=ready)
        case m.Stepped(progress=progress):
            return pb.TrainStepResponse(stepped=_stepped(progress))
        case m.Pushed():
            prepared = pb.PolicyPrepared(**shared_fields(news, pb.PolicyPrepared))
            return pb.TrainStepResponse(prepared=prepared)
        case messages.Saved() | m.Learned():
            raise errors.InvalidInput("no news of a step", seen=type(news).__name__)


def _stepped(progress: m.Progress) -> pb.PolicyStepped:
    return pb.PolicyStepped(
        policy_version=progress.policy_version,
        **shared_fields(progress.batch, pb.PolicyStepped),
        **shared_fields(progress.figures, pb.PolicyStepped),
        beyond=[to_message(one, pb.AuditVerdict) for one in progress.beyond],
    )
