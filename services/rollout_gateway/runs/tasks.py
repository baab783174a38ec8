"""RunTasks: runs tasks in environments, sample by sample.

Idempotent by (run, step, purpose, task, sample). A repeated call joins a running sample; a finished
training sample is returned from memory or from the ledger. Samples continue when their caller
disconnects, and the next call takes over the stream.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError, InvalidInput, PacelineError
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.environments import PreparesTasks
from paceline.services.rollout_gateway.environments.table import environment
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.runs import sample as sampled
from paceline.services.rollout_gateway.runs.hosted import HostedEnvironment
from paceline.services.rollout_gateway.runs.open import OpenRuns, Totals
from paceline.services.rollout_gateway.sessions.tree import check_trainable
from paceline.services.rollout_gateway.workers.metrics import describe_rounds
from paceline.tasks import MAX_SAMPLES, verifiers
from paceline.telemetry import get_logger, names, span
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

ANSWERS_REMEMBERED = 16_384
log = get_logger(__name__)


def shares(samples: int, workers: int) -> list[int]:
    """The worker of each sample, in equal shares. Siblings are neighbours and lie together, so that
    workers end apart and lend their slots.
    """
    return [one * workers // samples for one in range(samples)]


async def _prepare(prepared: PreparesTasks, request: rpb.RunTasksRequest) -> None:
    """Let an environment load the tasks' requirements. A task with a fault is left to its samples,
    which fail alone. Errors of settings and infrastructure are raised.
    """
    try:
        await prepared.prepare([task.metadata for task in request.tasks])
    except Exception as error:
        own = isinstance(error, InvalidInput) and not isinstance(error, ConfigError)
        if isinstance(error, PacelineError) and not own:
            raise
        seen = f"{type(error).__name__}: {error}"
        log.warning("tasks are not prepared", environment=request.environment, error=seen)


class TaskRuns:
    """All RunTasks calls of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._samples = sampled.SampleRuns(gateway)
        self.open = OpenRuns(gateway)
        self._hosts: dict[str, HostedEnvironment] = {}
        self._running: dict[str, tuple[asyncio.Task[rpb.SampleFinished], int]] = {}
        """Each running sample and its first worker, by key."""
        self._answers: OrderedDict[str, rpb.SampleFinished] = OrderedDict()

    async def run(
        self, request: rpb.RunTasksRequest, within_s: float | None = None
    ) -> AsyncGenerator[rpb.RunTasksResponse]:
        """Yield samples as they end, groups as they close, the end of each worker's share, then the
        totals. within_s: seconds until the call's deadline.

        Raises InvalidInput or NotFound for a request that can never work, ResourceExhausted while
        too many trajectories wait.
        """
        self._set_offers(request)
        if request.arms:
            await self._gateway.learn_arms(request.arms)
        if request.open_groups and not request.tasks:
            async with aclosing(self.open.run(request)) as responses:
                async for response in responses:
                    yield response
            return

        await self._check(request)
        self._gateway.admit()
        started = asyncio.get_running_loop().time()
        metrics, split = self._gateway.router.metrics, self._gateway.router.metrics.split
        tasks, each = len(request.tasks), request.samples_per_task
        about = {names.TASKS: tasks, names.SAMPLES_PER_TASK: each}
        with span(names.RUN_TASKS, about) as current:
            workers = len(self._gateway.router.seats)
            # A hanging environment costs its sample and not the call.
            longest_s = self._gateway.config.sessions.timeout_s
            half_s = longest_s if within_s is None else within_s / 2
            silence_s = min(longest_s, request.silence_s or longest_s, half_s)
            jobs = self._jobs(request, workers, silence_s)
            records = await self._records(jobs)
            groups = [job.task.group_id for job in jobs if job.trains]
            totals = Totals([job.worker_index for job in jobs], groups, range(workers), started)
            for share in totals.idle_shares():
                yield rpb.RunTasksResponse(share=share)
            async with aclosing(self._outcomes(jobs, records)) as outcomes:
                async for job, sample in outcomes:
                    for news in totals.news(sample, job.worker_index):
                        yield news
            finished = await totals.closing(self._gateway)
            describe_rounds(current, finished, metrics.split - split)
            yield rpb.RunTasksResponse(finished=finished)

    async def stop(self) -> None:
        """End the hosted environments."""
        await asyncio.gather(*(host.stop() for host in self._hosts.values()))

    def _set_offers(self, request: rpb.RunTasksRequest) -> None:
        """Decide whether agents may claim the tasks of this run."""
        offers = self._gateway.agents.offers
        if request.tasks and request.environment == sampled.EXTERNAL:
            offers.record_offers()
        elif request.purpose == tpb.PURPOSE_TRAIN:
            whose = "are its agents' own: they open sessions with a task_id"
            if request.tasks:
                whose = f"are answered by the environment {request.environment!r}"
            offers.refuse(f"the tasks of this run {whose}")

    async def _check(self, request: rpb.RunTasksRequest) -> None:
        purpose, allowed = int(request.purpose), "PURPOSE_TRAIN, PURPOSE_EVAL"
        if purpose not in (tpb.PURPOSE_TRAIN, tpb.PURPOSE_EVAL):
            raise InvalidInput("purpose is not set", seen=purpose, allowed=allowed)
        samples, allowed = len(request.tasks) * request.samples_per_task, f"1 to {MAX_SAMPLES}"
        if not 1 <= samples <= MAX_SAMPLES:
            raise InvalidInput("tasks times samples_per_task", seen=samples, allowed=allowed)
        if len({task.task_id for task in request.tasks}) != len(request.tasks):
            raise InvalidInput("a task stands twice in one call", allowed="distinct task ids")
        if verifiers.is_environment(name := request.environment):
            if name not in self._hosts:
                self._hosts[name] = HostedEnvironment(self._gateway, name)
            await self._hosts[name].prepare()
        elif request.environment != sampled.EXTERNAL:
            found = environment(request.environment, self._gateway.equipment)
            if isinstance(found, PreparesTasks):
                await _prepare(found, request)
        if request.reward != sampled.AGENT:
            await self._gateway.rewards.check(request.reward)
        if not 0 <= request.turn_discount <= 1:
            raise InvalidInput("turn_discount", seen=request.turn_discount, allowed="0 to 1")
        if request.purpose == tpb.PURPOSE_TRAIN:
            check_trainable(wire.sampling_from(request.sampling))

    def _jobs(
        self, request: rpb.RunTasksRequest, workers: int, silence_s: float
    ) -> list[sampled.Job]:
        """Every sample with its worker. Repeats with the same workers give the same assignment, and
        a sample that already runs keeps its worker.
        """
        size, settings = request.samples_per_task, sampled.settings_digest(request)
        places = shares(len(request.tasks) * size, workers)
        samples, jobs = itertools.product(request.tasks, range(size)), []
        for (task, sample), place in zip(samples, places, strict=True):
            job = sampled.Job(request, task, sample, place, settings, silence_s)
            _, worker = self._running.get(job.key, (None, place))
            jobs.append(replace(job, worker_index=worker))
        return jobs

    async def _records(self, jobs: list[sampled.Job]) -> Mapping[str, list[dict[str, Any]]]:
        """Ledger records of the step, if any sample is missing in memory."""
        known = all(job.key in self._running or job.key in self._answers for job in jobs)
        if known or not jobs[0].trains:
            return {}
        context = jobs[0].request.context
        return await self._gateway.outbox.finals(context.run_id, context.step)

    async def _outcomes(
        self, jobs: list[sampled.Job], records: Mapping[str, list[dict[str, Any]]]
    ) -> AsyncGenerator[tuple[sampled.Job, rpb.SampleFinished]]:
        """Yield every job with its outcome, in the order of their ends.

        Raises Unavailable as soon as a worker cannot start because the serving set is damaged. The
        trainer pushes that set again before the next call.
        """
        ended = asyncio.Queue[tuple[sampled.Job, asyncio.Task[Any] | rpb.SampleFinished]]()

        def ends(job: sampled.Job, task: asyncio.Task[Any]) -> None:
            task.add_done_callback(lambda done: ended.put_nowait((job, done)))

        for job in jobs:
            if job.key in self._answers:
                ended.put_nowait((job, self._answers[job.key]))
            elif job.session_id in records:
                branches, source = records[job.session_id], job.request.reward
                ended.put_nowait((job, sampled.recorded_sample(branches, source, job.worker_index)))
            else:
                ends(job, self._begin(job))
        damaged = asyncio.create_task(self._gateway.weights.damaged())
        ends(jobs[0], damaged)
        try:
            for _ in jobs:
                job, outcome = await ended.get()
                yield job, outcome.result() if isinstance(outcome, asyncio.Task) else outcome
        finally:
            damaged.cancel()

    def _begin(self, job: sampled.Job) -> asyncio.Task[rpb.SampleFinished]:
        """The asyncio task of a sample, started now or by an earlier call."""
        if job.key not in self._running:
            task = asyncio.create_task(self._samples.run(job))
            self._running[job.key] = task, job.worker_index
            task.add_done_callback(lambda done: self._ended(job, done))
            self._gateway.samples_left = len(self._running)
        return self._running[job.key][0]

    def _ended(self, job: sampled.Job, task: asyncio.Task[rpb.SampleFinished]) -> None:
        del self._running[job.key]
        self._gateway.samples_left = len(self._running)
        self._gateway.activity.moves()
        if task.cancelled() or task.exception() is not None:
            return
        answer = task.result()
        # evaluations are not remembered: the weights may have changed
        if job.trains and answer.HasField("reward"):
            self._answers[job.key] = answer
            if len(self._answers) > ANSWERS_REMEMBERED:
                self._answers.popitem(last=False)
