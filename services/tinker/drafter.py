"""Leases engine slots to the drafter trainer while no sample runs, in the coordinator's place."""

import asyncio
from contextlib import aclosing
from itertools import count
from typing import Any

import grpc

from paceline.errors import PacelineError
from paceline.local.patience import cancel, patient
from paceline.messages import merge_arms, versions_from_proto
from paceline.rpc import leased, leases, rpc_errors, wait_healthy
from paceline.services.tinker.config import TinkerConfig
from paceline.speculators.costs import round_costs
from paceline.telemetry import get_logger
from paceline.v1 import drafter_pb2, rollout_pb2
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import commit_versions

_RESUME_S = _STILL_S = 300.0
"""Seconds for the return of workers, which may read weights again; seconds without progress of the
drafter trainer after which its lease ends.
"""
_log = get_logger(__name__)


class DrafterLeases:
    """The drafter trainer's leases, one at a time. Use on one event loop."""

    def __init__(
        self,
        config: TinkerConfig,
        gateway: grpc.aio.Channel,
        trainer: grpc.aio.Channel,
        context: CommandContext,
    ) -> None:
        """`context`: of this process's other commands."""
        self.enabled = config.drafter_workers > 0
        self.promoted = 0
        """Version of a drafter that the gateway has and does not serve; 0: none."""
        self._config, self._process = config, context
        self._gateway, self._trainer = gateway, trainer
        self._rollouts: Any = RolloutServiceStub(gateway)  # type: ignore[no-untyped-call]
        self._epochs = count(context.epoch << 30)  # above those of earlier processes
        self._lease: asyncio.Task[None] | None = None
        # under which workers may be lent, also to an earlier process
        self._lent: CommandContext | None = self._context() if self.enabled else None
        self._wanted = asyncio.Event()  # a sample waits for the slots

    @property
    def held(self) -> bool:
        """Whether `end` must be called before a sample."""
        return self._lease is not None

    def begin(self) -> None:
        """Starts a lease after `idle_s` seconds without `end`."""
        if self.enabled and self._lease is None:
            self._wanted.clear()
            self._lease = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Returns when the engine has all slots. Raises the gateway's errors."""
        self._wanted.set()
        if self._lease is not None:
            await asyncio.wait({self._lease})
            lease, self._lease = self._lease, None
            lease.result()
        await self._give_back()

    def _context(self) -> CommandContext:
        return leased(self._config.security, self._config.run.id, 0, next(self._epochs))

    async def _run(self) -> None:
        """One lease, from the pause to the return of the slots."""
        wanted = asyncio.create_task(self._wanted.wait())
        if (await asyncio.wait({wanted}, timeout=self._config.idle_s))[0]:
            return
        context = self._context()
        training = asyncio.create_task(self._train(context))
        traffic = asyncio.ensure_future(anext(leases.waiting_traffic(self._gateway)))
        tasks = {wanted, training, traffic}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            deadline_s = patient(leases.PREEMPT_S)
            if not training.done() and self._lent is not None:
                await leases.request_preemption(self._trainer, context, deadline_s)
                await asyncio.wait({training}, timeout=deadline_s)
            if training.done():
                training.result()
        except (PacelineError, TimeoutError) as error:
            _log.warning("the drafter's lease has failed", epoch=context.epoch, error=str(error))
        finally:
            await cancel(*tasks)
        try:
            await self._give_back()
        except PacelineError as error:  # `end` repeats it
            _log.warning("workers stay lent out for now", error=str(error))

    async def _train(self, context: CommandContext) -> None:
        """Lends slots to the trainer until it is done or preempted. Raises the services' errors."""
        config, deadline_s = self._config, patient(leases.ACTIVATION_S)
        await wait_healthy(config.addresses.drafter_trainer, config.security, deadline_s)
        with rpc_errors():
            asked = rollout_pb2.GetStatusRequest()
            status = await self._rollouts.GetStatus(asked, timeout=deadline_s)
        if status.versions.seq:
            try:
                serving = versions_from_proto(status.versions)
                await commit_versions(self._trainer, self._process, serving)
            except PacelineError as error:  # it learns nothing from rows of a head that it lacks
                _log.warning("the drafter trainer lacks the serving set", error=str(error))
        slots = range(min(config.drafter_workers, len(status.workers)))
        self._lent = context
        with rpc_errors():
            release = rollout_pb2.ReleaseWorkersRequest(context=context, workers=slots)
            await self._rollouts.ReleaseWorkers(release, timeout=deadline_s)
        arms = merge_arms(arm for worker in status.workers for arm in worker.health.arms)
        request = drafter_pb2.ActivateRequest(
            context=context, slots=slots, deadline_s=deadline_s, versions=status.versions
        )
        request.round_costs.extend(round_costs(arms))
        async with aclosing(leases.activation(self._trainer, request, _STILL_S)) as news:
            async for name, answer in news:
                if name == "gate" and answer.promoted:
                    self.promoted = answer.drafter_version

    async def _give_back(self) -> None:
        if self._lent is not None:
            request = rollout_pb2.ResumeWorkersRequest(context=self._lent)
            with rpc_errors():
                await self._rollouts.ResumeWorkers(request, timeout=patient(_RESUME_S))
            self._lent = None
