"""Runs one sample of a task: its session from the assignment to the reward."""

import asyncio
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import DataLoss, DeadlineExceeded, InvalidInput, PacelineError, Unavailable
from paceline.messages import stats_to_proto
from paceline.services.rollout_gateway import environments
from paceline.services.rollout_gateway.calls.call import Call, Plan
from paceline.services.rollout_gateway.calls.planner import Asked
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.environments.table import environment
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.sessions import Assignment, FailReason, SessionState
from paceline.services.rollout_gateway.sessions.groups import ATTEMPTS, Offer
from paceline.services.rollout_gateway.sessions.session import OWN_LIMITS, Caller, Grant, Session
from paceline.tasks import verifiers
from paceline.telemetry import Attributes, get_logger, link_current, names, span
from paceline.trajectory import SpeculationStats, request_seed, tokens_hash
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

log = get_logger(__name__)
_NOT_IN_NAMES = re.compile(r"[/%\x00-\x1f]")
"""Characters that a session's name cannot contain, because the name is part of a URL's path."""
EXTERNAL = "external"
"""The environment in which external agents claim the tasks."""
AGENT = "agent"
"""The reward that the agent posts itself."""


def is_offered(name: str) -> bool:
    """Whether samples of an environment are offered: to agents, or to the environment's host."""
    return name == EXTERNAL or verifiers.is_environment(name)


@dataclass(frozen=True)
class Job:
    """One sample to run."""

    request: rpb.RunTasksRequest
    task: rpb.TaskSpec
    sample_index: int
    worker_index: int
    settings: str  # digest of the settings shared by all samples
    silence_s: float  # longest time in seconds between an environment's model calls

    @property
    def session_id(self) -> str:
        """Derived from the request, so that a repeated call means the same session."""
        task_id = _NOT_IN_NAMES.sub(lambda odd: f"%{ord(odd[0]):02X}", self.task.task_id)
        return f"{self.request.context.step}-{task_id}-{self.sample_index}"

    @property
    def trains(self) -> bool:
        return bool(self.request.purpose == tpb.PURPOSE_TRAIN)

    @property
    def key(self) -> str:
        """Identity of the sample. Evaluations with other settings, e.g. another arm, are other
        samples.
        """
        run = f"train/{self.request.context.run_id}" if self.trains else self.settings
        return f"{run}/{self.session_id}"


def settings_digest(request: rpb.RunTasksRequest) -> str:
    """Digest of the settings that all samples of a request share."""
    rest = rpb.RunTasksRequest()
    rest.CopyFrom(request)
    del rest.tasks[:], rest.arms[:]
    rest.context.epoch = 0
    rest.capture, rest.silence_s = False, 0.0  # as arms, they change no token
    return hashlib.sha256(rest.SerializeToString(deterministic=True)).hexdigest()


@dataclass(eq=False)
class _SessionModel:
    """The model as one sample's environment sees it."""

    _gateway: Gateway
    _job: Job
    _session: Session
    silence: asyncio.Timeout | None
    """Timeout that runs while no model call is in progress; None: the environment has ended."""
    _under_way = 0

    def __post_init__(self) -> None:
        # a distinct completion id for each call, also for parallel calls
        self._calls = itertools.count()

    def encode(self, text: str) -> tuple[int, ...]:
        return self._gateway.codec.encode(text, self._gateway.router.ready.max_sequence_tokens)

    async def generate(self, prompt: tuple[int, ...]) -> environments.TextTurn:
        call = await self._run(await self._gateway.planner.completions(self._asked(), [prompt]))
        return environments.TextTurn(tuple(call.whole.token_ids), call.text, call.finish)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> environments.ChatTurn:
        request = ChatRequest(tuple(messages), tuple(tools))
        asked = self._asked(sum(len(message.content) for message in messages))
        call = await self._run(await self._gateway.planner.chat(asked, request))
        return environments.ChatTurn(call.message or Message("assistant", call.text), call.finish)

    def score(self, reward: float) -> None:
        """See Model."""
        self._session.score(Grant(reward, self._session.tree.turns[-1].completion_id))

    def _asked(self, size: int = 0) -> Asked:
        name = f"{self._session.session_id}.{next(self._calls)}"
        arm = self._job.request.forced_arm
        return Asked(Caller(self._session), self._sampling, name, forced_arm=arm, size=size)

    def _sampling(self, room: int) -> tpb.SamplingParams:
        sampling = tpb.SamplingParams()
        sampling.CopyFrom(self._job.request.sampling)
        sampling.ClearField("seed")  # the session sets the seed
        return sampling

    async def _run(self, plans: Sequence[Plan]) -> Call:
        (plan,) = plans
        plan = replace(plan, worker=self._job.worker_index, queue_key=None)
        self._count_silence(None)
        self._under_way += 1
        try:
            return await Call(self._gateway, plan).run()
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._count_silence(asyncio.get_running_loop().time() + self._job.silence_s)

    def _count_silence(self, until_s: float | None) -> None:
        if self.silence is not None:
            self.silence.reschedule(until_s)


class SampleRuns:
    """Runs samples of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def run(self, job: Job) -> rpb.SampleFinished:
        """Run a sample from its task to its outcome."""
        task = job.task
        asked = EpisodeTask(task.task_id, task.prompt, task.answer, dict(task.metadata))
        about, external = self._assignment(job), is_offered(job.request.environment)
        labels: Attributes = {names.SESSION_ID: job.session_id, names.TASK: task.task_id}
        with span(names.SESSION, {**labels, names.RL_STEP: about.step}):
            if external:
                session, episode = await self._led_by_agent(job, asked, about)
            else:
                session = Session(job.session_id, about, self._gateway.config.sessions)
                episode = await self._led_here(job, asked, session)
            link_current([session.traceparent])
            await self._score(job, session, episode)
        finish = "error" if session.state is SessionState.FAILED else episode.finish
        return sample_finished(session, job.worker_index, job.request.reward, finish)

    def _assignment(self, job: Job) -> Assignment:
        request, task, gateway = job.request, job.task, self._gateway
        seed = request_seed(request.run_seed, request.context.step, task.task_id, job.sample_index)
        hosted = verifiers.is_environment(request.environment)
        overrides = hosted or gateway.config.sessions.untrainable == "override"
        sampling, by_turn = request.sampling, job.trains and request.HasField("turn_discount")
        return Assignment(
            run_id=request.context.run_id,
            step=request.context.step,
            task_id=task.task_id,
            group_id=task.group_id,
            group_size=request.samples_per_task,
            task_index=task.task_index,
            sample_index=job.sample_index,
            trainable=job.trains,
            temperature=sampling.temperature,
            turn_discount=request.turn_discount if by_turn else None,
            seed=seed,
            capture=request.capture and job.trains and gateway.captures(seed),
            override=overrides and is_offered(request.environment),
            # all attempts of a silent environment end within the time of one
            timeout_s=job.silence_s / ATTEMPTS[FailReason.DATA] if hosted else 0.0,
            forced_arm=request.forced_arm if is_offered(request.environment) else "",
            sampling=_named(sampling) if hosted else {},
        )

    async def _led_here(self, job: Job, asked: EpisodeTask, session: Session) -> Episode:
        """Let an environment of the gateway lead the session.

        A fault of a task, its numbers or a user's environment ends that sample alone.
        Infrastructure faults are raised to the caller.
        """
        led = environment(job.request.environment, self._gateway.equipment)
        try:
            async with asyncio.timeout(job.silence_s) as silence:
                model = _SessionModel(self._gateway, job, session, silence)
                try:
                    return environments.checked_episode(await led.run(asked, model))
                finally:
                    model.silence = None
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if not _is_the_samples(error):
                raise
            if not isinstance(error, PacelineError):
                log.warning("an environment raised", task=asked.task_id, exc_info=error)
            message = f"silent for {job.silence_s:g} s" if silence.expired() else _told(error)
            self._gateway.agents.finish(session, fail=FailReason.DATA, message=message)
            return Episode(asked, "", "error")

    async def _led_by_agent(
        self, job: Job, asked: EpisodeTask, about: Assignment
    ) -> tuple[Session, Episode]:
        """Offer the task until an external agent claims it and leads its session to an end."""
        offers, name = self._gateway.agents.offers, job.request.environment
        whose = "" if name == EXTERNAL else name
        offer = Offer(asked, about, job.session_id, job.worker_index, whose)
        session = await offers.offer_task(offer)
        turns = session.tree.turns
        text = self._gateway.codec.decode(turns[-1].response_ids) if turns else ""
        messages = tuple(turn.message for turn in turns if turn.message is not None)
        ended = session.state not in (SessionState.OPEN, SessionState.FINAL, SessionState.UNSCORED)
        finish = "abort" if ended else turns[-1].finish if turns else "stop"
        return session, Episode(asked, text, finish, messages, session.reward)

    async def _score(self, job: Job, session: Session, episode: Episode) -> None:
        """End the session with its reward. An unavailable reward counts as an infrastructure fault,
        never as reward 0.
        """
        scored = episode.finish in ("stop", "length", "tool_calls")
        try:
            told = episode.reward
            if scored and told is not None and not session.scored:
                session.score(Grant(told))
            unscored = scored and bool(session.tree.turns) and not session.scored
            if unscored and session.state is SessionState.OPEN and job.request.reward != AGENT:
                score = await self._gateway.rewards.rule(job.request.reward).scored(episode)
                if score is not None:
                    session.score(Grant(score.value, parts=score.parts))
        except Exception as error:  # noqa: BLE001 - a sample's reward must not end the call
            away = isinstance(error, Unavailable | DeadlineExceeded)
            reason = FailReason.INFRA if away else FailReason.DATA
            self._gateway.agents.finish(session, fail=reason, message=_told(error))
        else:
            self._gateway.agents.finish(session, abort=not scored)


def _named(sampling: tpb.SamplingParams) -> dict[str, float]:
    """The run's sampling by the names of OpenAI's API."""
    named = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    return named | ({"top_p": sampling.top_p} if sampling.top_p else {})


def _is_the_samples(error: BaseException) -> bool:
    """Whether the sample's task or environment is at fault, not the infrastructure or the
    caller.
    """
    if isinstance(error, asyncio.CancelledError):
        current = asyncio.current_task()
        return current is not None and not current.cancelling()
    if isinstance(error, PacelineError):
        return isinstance(error, InvalidInput | DataLoss) or error.reason in OWN_LIMITS
    return True


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"


def sample_finished(
    session: Session, worker_index: int, source: str, finish: str
) -> rpb.SampleFinished:
    """The outcome of a session."""
    turns, about = session.tree.turns, session.assignment
    response = [token for turn in turns for token in turn.response_ids]
    stats = sum((turn.speculation for turn in turns), SpeculationStats())
    rewards = [one.reward for one in session.trajectories() if one.reward is not None]
    final = session.state is SessionState.FINAL
    return rpb.SampleFinished(
        task_id=about.task_id,
        group_id=session.group_id,
        sample_index=about.sample_index,
        worker_index=worker_index,
        reward=_mean_reward(rewards, source, session.reward_parts) if final and rewards else None,
        prompt_tokens=len(turns[0].prompt_ids) if turns else 0,
        response_tokens=len(response),
        finish_reason=_reason("stop" if finish == "tool_calls" else finish),
        speculation=stats_to_proto(stats),
        smallest_gap=min((turn.smallest_gap for turn in turns), default=0.0),
        tokens_hash=tokens_hash(response),
        session_id=session.session_id,
    )


def recorded_sample(
    branches: Sequence[Mapping[str, Any]], source: str, worker_index: int = 0, finish: str = ""
) -> rpb.SampleFinished:
    """The outcome of a session of an earlier process, from its branches in the ledger. Its counters
    are lost.

    `finish`: replaces the ledger's finish reason.
    """
    first, rewards = branches[0], [branch["reward"] for branch in branches]
    return rpb.SampleFinished(
        **{name: first[name] for name in ("task_id", "group_id", "sample_index")},
        worker_index=worker_index,
        reward=_mean_reward(rewards, source, first["reward_parts"]),
        prompt_tokens=first["tokens"] - first["trained_tokens"],
        response_tokens=sum(branch["trained_tokens"] for branch in branches),
        finish_reason=_reason(finish or first["finish_reason"]),
        smallest_gap=float("inf"),
        tokens_hash=first["response_hash"] if len(branches) == 1 else "",
        session_id=first["key"].rpartition("/")[0],
    )


def _mean_reward(rewards: Sequence[float], source: str, parts: Mapping[str, float]) -> tpb.Reward:
    return tpb.Reward(value=sum(rewards) / len(rewards), source=source, parts=parts)


def _reason(finish: str) -> str:
    """The finish reason's name on the wire."""
    return f"FINISH_REASON_{finish.upper()}"
