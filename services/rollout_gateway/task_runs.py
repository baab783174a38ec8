"""RunTasks: tasks of the built-in environments, sample by sample. Owns which samples run and what they answered.

Idempotent by (run, step, purpose, task, sample): a running sample is joined, a finished training sample is answered
from memory or from the ledger. A caller that goes away does not stop its samples; the next one takes over the stream.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidInput
from paceline.telemetry import span
from paceline.trajectory import BranchKey, SpeculationStats, request_seed, tokens_hash
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.bandits.regret import regret
from rollout_gateway.chat.messages import Message
from rollout_gateway.engine_metrics import describe, describe_rounds
from rollout_gateway.engines import wire
from rollout_gateway.environments import Equipment, environment
from rollout_gateway.environments.base import ChatTurn, EpisodeTask, Turn
from rollout_gateway.gateway import Gateway
from rollout_gateway.generation import Generation
from rollout_gateway.rewards import reward_rule
from rollout_gateway.sandbox import Sandbox
from rollout_gateway.session import FINISH_NAMES, Assignment, Session, check_trainable

MAX_SAMPLES = 65_536
ANSWERS_REMEMBERED = 16_384
_FINISH_VALUES = {name: value for value, name in FINISH_NAMES.items()}


@dataclass(frozen=True)
class _Job:
    """One sample to run."""

    request: rpb.RunTasksRequest
    task: rpb.TaskSpec
    sample_index: int
    worker_index: int
    settings: str  # digest of what is asked of every sample

    @property
    def session_id(self) -> str:
        """Fixed by what is asked, so that a repeated call means the same branch."""
        return f"{self.request.context.step}-{self.task.task_id}-{self.sample_index}"

    @property
    def trains(self) -> bool:
        return bool(self.request.purpose == tpb.PURPOSE_TRAIN)

    @property
    def key(self) -> str:
        """Identity. Evaluations with other settings, e.g. another arm, are other samples."""
        run = self.request.context.run_id
        return f"train/{run}/{self.session_id}" if self.trains else f"{self.settings}/{self.session_id}"


def _settings(request: rpb.RunTasksRequest) -> str:
    rest = rpb.RunTasksRequest()
    rest.CopyFrom(request)
    del rest.tasks[:]
    rest.context.epoch = 0
    return hashlib.sha256(rest.SerializeToString(deterministic=True)).hexdigest()


class _SessionModel:
    """The model as one sample's environment sees it."""

    def __init__(self, gateway: Gateway, job: _Job, session: Session) -> None:
        self._gateway = gateway
        self._job = job
        self._session = session
        self.sampling = tpb.SamplingParams()
        self.sampling.CopyFrom(job.request.sampling)
        self.sampling.seed = request_seed(
            job.request.run_seed, job.request.context.step, job.task.task_id, job.sample_index
        )
        self.generations: list[Generation] = []

    def encode(self, text: str) -> tuple[int, ...]:
        return self._gateway.codec.encode(text)

    async def generate(self, prompt: tuple[int, ...]) -> Turn:
        job, gateway = self._job, self._gateway
        capture = job.request.capture and job.trains and gateway.captures(self.sampling.seed)
        branch = self._session.begin(prompt, self.sampling)
        with span("engine.request", worker=job.worker_index, prompt_tokens=len(prompt)) as current:
            generation = gateway.submit(
                prompt,
                self.sampling,
                capture=capture,
                forced_arm=job.request.forced_arm,
                worker=job.worker_index,
            )
            self.generations.append(generation)
            whole = await generation.result()
            describe(current, generation)
        self._session.end(branch, prompt, self.sampling, whole)
        if capture:
            gateway.publish_rows(generation, self._session)
        text = gateway.codec.decode(whole.token_ids)
        if whole.matched_stop:
            text = text.partition(whole.matched_stop)[0]
        return Turn(tuple(whole.token_ids), text, FINISH_NAMES[whole.finish_reason])

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> ChatTurn:
        turn = await self.generate(self._gateway.codec.encode_chat([one.for_template() for one in messages]))
        return ChatTurn(Message("assistant", turn.text), turn.finish)


class TaskRuns:
    """All RunTasks calls of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._equipment = Equipment(Sandbox(gateway.config.rewards.sandbox))
        self._running: dict[str, asyncio.Task[rpb.SampleFinished]] = {}
        self._answers: OrderedDict[str, rpb.SampleFinished] = OrderedDict()

    async def run(self, request: rpb.RunTasksRequest) -> AsyncGenerator[rpb.RunTasksResponse]:
        """Samples as they end, each worker's end of its share, then the totals.

        Raises InvalidInput or NotFound for a request that can never work, ResourceExhausted while trajectories pile up.
        """
        self._check(request)
        self._gateway.admit()
        started = asyncio.get_running_loop().time()
        metrics = self._gateway.router.metrics
        split = metrics.split
        with span("rollout.run_tasks", tasks=len(request.tasks), samples=request.samples_per_task) as current:
            jobs = self._jobs(request)
            records = await self._records(jobs)
            totals = _Totals(jobs, self._gateway.router.count, started)
            for share in totals.idle_shares():
                yield rpb.RunTasksResponse(share=share)
            async for sample in self._outcomes(jobs, records):
                yield rpb.RunTasksResponse(sample=sample)
                ended = totals.add(sample)
                if ended is not None:
                    yield rpb.RunTasksResponse(share=ended)
            finished = await self._finished(totals)
            describe_rounds(current, finished, metrics.split - split)
            yield rpb.RunTasksResponse(finished=finished)

    def _check(self, request: rpb.RunTasksRequest) -> None:
        if request.purpose not in (tpb.PURPOSE_TRAIN, tpb.PURPOSE_EVAL):
            raise InvalidInput("purpose is not set", seen=int(request.purpose), allowed="PURPOSE_TRAIN, PURPOSE_EVAL")
        samples = len(request.tasks) * request.samples_per_task
        if not 1 <= samples <= MAX_SAMPLES:
            raise InvalidInput("tasks times samples_per_task", seen=samples, allowed=f"1 to {MAX_SAMPLES}")
        if len({task.task_id for task in request.tasks}) != len(request.tasks):
            raise InvalidInput("a task stands twice in one call", allowed="distinct task ids")
        environment(request.environment, self._equipment)
        reward_rule(request.reward, self._gateway.config.rewards.marker)
        if request.purpose == tpb.PURPOSE_TRAIN:
            check_trainable(request.sampling)

    def _jobs(self, request: rpb.RunTasksRequest) -> list[_Job]:
        """Sample j of task i goes to worker (i * samples + j) mod workers: equal shares, the same on every repeat."""
        size, workers = request.samples_per_task, self._gateway.router.count
        settings = _settings(request)
        return [
            _Job(request, task, sample, (index * size + sample) % workers, settings)
            for index, task in enumerate(request.tasks)
            for sample in range(size)
        ]

    async def _records(self, jobs: list[_Job]) -> Mapping[str, dict[str, Any]]:
        """Ledger records of the step, if any of the samples is not known here."""
        known = all(job.key in self._running or job.key in self._answers for job in jobs)
        if known or not jobs[0].trains:
            return {}
        context = jobs[0].request.context
        return await self._gateway.outbox.finals(context.run_id, context.step)

    async def _outcomes(
        self, jobs: list[_Job], records: Mapping[str, dict[str, Any]]
    ) -> AsyncIterator[rpb.SampleFinished]:
        """Every job's outcome, in the order of their ends."""
        ended: asyncio.Queue[asyncio.Task[rpb.SampleFinished] | rpb.SampleFinished] = asyncio.Queue()
        for job in jobs:
            key = str(BranchKey(job.request.context.run_id, job.session_id))
            if job.key in self._answers:
                ended.put_nowait(self._answers[job.key])
            elif key in records:
                ended.put_nowait(_from_record(job, records[key]))
            else:
                self._begin(job).add_done_callback(ended.put_nowait)
        for _ in jobs:
            outcome = await ended.get()
            yield outcome.result() if isinstance(outcome, asyncio.Task) else outcome

    def _begin(self, job: _Job) -> asyncio.Task[rpb.SampleFinished]:
        """The task that runs a sample, now or since an earlier call."""
        task = self._running.get(job.key)
        if task is None:
            task = self._running[job.key] = asyncio.create_task(self._sample(job))
            task.add_done_callback(lambda done: self._ended(job, done))
        return task

    def _ended(self, job: _Job, task: asyncio.Task[rpb.SampleFinished]) -> None:
        del self._running[job.key]
        if task.cancelled() or task.exception() is not None:
            return
        answer = task.result()
        if job.trains and answer.HasField("reward"):  # evaluations run again: the weights may have moved
            self._answers[job.key] = answer
            if len(self._answers) > ANSWERS_REMEMBERED:
                self._answers.popitem(last=False)

    async def _sample(self, job: _Job) -> rpb.SampleFinished:
        request, task = job.request, job.task
        context = request.context
        about = Assignment(
            run_id=context.run_id,
            step=context.step,
            task_id=task.task_id,
            group_id=task.group_id,
            group_size=request.samples_per_task,
            task_index=task.task_index,
            sample_index=job.sample_index,
            trainable=job.trains,
        )
        session = Session(job.session_id, about)
        with span("rollout.session", session=job.session_id, task=task.task_id, step=context.step):
            model = _SessionModel(self._gateway, job, session)
            asked = EpisodeTask(task.task_id, task.prompt, task.answer, dict(task.metadata))
            episode = await environment(request.environment, self._equipment).run(asked, model)
            scored = episode.finish in ("stop", "length")
            if scored:
                value = await reward_rule(request.reward, self._gateway.config.rewards.marker).score(episode)
                if value is not None:
                    session.score(value)
            self._gateway.finish(session, abort=not scored)
        return _answer(job, session, model.generations, episode.finish)

    async def _finished(self, totals: _Totals) -> rpb.TasksFinished:
        finished = totals.finished
        finished.versions.CopyFrom(wire.versions_to(self._gateway.weights.versions))
        finished.arms.extend(merge_arms(list((await self._gateway.router.healths()).values())))
        finished.regret = regret(finished.arms)
        return finished


class _Totals:
    """Counts outcomes by worker and in all."""

    def __init__(self, jobs: list[_Job], workers: int, started: float) -> None:
        self._left = Counter(job.worker_index for job in jobs)
        self._workers = workers
        self._started = started
        self._shares = [rpb.ShareDone(worker_index=index) for index in range(workers)]
        self._stats = SpeculationStats()
        self.finished = rpb.TasksFinished()

    def idle_shares(self) -> list[rpb.ShareDone]:
        """Workers that have nothing to do in this call."""
        return [share for share in self._shares if not self._left[share.worker_index]]

    def add(self, sample: rpb.SampleFinished) -> rpb.ShareDone | None:
        """Count a sample; the share it completes, if it does."""
        share, finished = self._shares[sample.worker_index], self.finished
        share.samples += 1
        share.response_tokens += sample.response_tokens
        finished.response_tokens += sample.response_tokens
        finished.scored += sample.HasField("reward")
        finished.unscored += not sample.HasField("reward")
        self._stats += wire.stats_from(sample.speculation)
        finished.speculation.CopyFrom(wire.stats_to(self._stats))
        finished.rollout_s = share.elapsed_s = asyncio.get_running_loop().time() - self._started
        self._left[sample.worker_index] -= 1
        return None if self._left[sample.worker_index] else share


def merge_arms(healths: list[pb.WorkerHealth]) -> list[pb.ArmStats]:
    """Bandit statistics of several workers: counts summed, means weighted by pulls."""
    merged: dict[tuple[str, int], pb.ArmStats] = {}
    for stats in (stats for health in healths for stats in health.arms):
        into = merged.setdefault(
            (stats.arm, stats.batch_group), pb.ArmStats(arm=stats.arm, batch_group=stats.batch_group)
        )
        pulls = into.pulls + stats.pulls
        for name in ("mean_tokens_per_s", "mean_accept_length"):
            total = getattr(into, name) * into.pulls + getattr(stats, name) * stats.pulls
            setattr(into, name, total / pulls if pulls else 0.0)
        into.pulls = pulls
        into.explorations += stats.explorations
        into.drafter_deaths += stats.drafter_deaths
    return [merged[key] for key in sorted(merged)]


def _answer(job: _Job, session: Session, generations: list[Generation], finish: str) -> rpb.SampleFinished:
    response = [token for generation in generations for token in generation.whole.token_ids]
    stats = sum((wire.stats_from(generation.whole.speculation) for generation in generations), SpeculationStats())
    return rpb.SampleFinished(
        task_id=job.task.task_id,
        group_id=job.task.group_id,
        sample_index=job.sample_index,
        worker_index=job.worker_index,
        reward=None if session.reward is None else tpb.Reward(value=session.reward, source=job.request.reward),
        prompt_tokens=len(generations[0].request.prompt_token_ids) if generations else 0,
        response_tokens=len(response),
        finish_reason=_FINISH_VALUES[finish],
        speculation=wire.stats_to(stats),
        smallest_gap=min((generation.whole.smallest_gap for generation in generations), default=0.0),
        tokens_hash=tokens_hash(response),
        session_id=session.session_id,
    )


def _from_record(job: _Job, record: dict[str, Any]) -> rpb.SampleFinished:
    """An outcome as the ledger knows it; its counters are gone."""
    return rpb.SampleFinished(
        task_id=job.task.task_id,
        group_id=job.task.group_id,
        sample_index=job.sample_index,
        worker_index=job.worker_index,
        reward=tpb.Reward(value=record["reward"], source=job.request.reward),
        prompt_tokens=record["tokens"] - record["trained_tokens"],
        response_tokens=record["trained_tokens"],
        finish_reason=_FINISH_VALUES[record["finish_reason"]],
        smallest_gap=float("inf"),
        tokens_hash=record.get("response_hash", ""),
        session_id=job.session_id,
    )
