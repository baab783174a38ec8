"""Draws the tasks of steps and evaluations, as RunTasks requests with group ids. Shares
the groups that agents opened at several gateways among the steps.

A step's tasks depend only on the run's seed, the step and the round of dynamic sampling. A
restarted coordinator therefore requests the same tasks.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError
from paceline.messages import task_specs
from paceline.plugins import import_filter
from paceline.rpc import MOST_TASK_BYTES, leased, responses, rpc_errors
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.machine.state import Evaluation
from paceline.tasks import Task, draw_tasks
from paceline.tasks.file import TaskFile
from paceline.v1 import rollout_pb2, trajectory_pb2
from paceline.v1.rollout_pb2 import RunTasksRequest

EVALUATION_SEED = 20_000
"""The same for all evaluations, so that their values are comparable between steps and runs."""


OTHERS_SEED = 30_000
"""Added to the run's seed for the replacement tasks of dynamic sampling."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The tasks from one step on."""

    from_step: int
    tasks: TaskFile | None  # None: agents bring tasks
    heldout: Sequence[Task]


class TaskSource:
    """Training tasks step by step, held-out tasks for evaluations."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Raises TaskFileError (InvalidInput) for an unusable file, ConfigError for too
        few tasks.
        """
        self._config = config
        tasks = None if config.open_traffic else _enough(config, config.tasks_path)
        self._stages = [Stage(0, tasks, _heldout(config, config.heldout_path))]
        for step, later in sorted(config.later.items()):
            heldout = _heldout(config, later.heldout_path) or self._stages[-1].heldout
            self._stages.append(Stage(step, _enough(config, later.tasks_path), heldout))

    @property
    def described(self) -> str:
        """Number of training tasks and a hash of them, for each stage; empty in open traffic."""
        return "; ".join(
            f"{len(stage.tasks)} tasks of hash {stage.tasks.digest}"
            for stage in self._stages
            if stage.tasks
        )

    @property
    def samples_per_step(self) -> int:
        """Requested samples per step; 0 in open traffic, where agents decide."""
        config = self._config
        return 0 if config.open_traffic else config.prompts_per_step * config.samples_per_task

    def step_request(
        self,
        step: int,
        epoch: int,
        round_number: int = 0,
        places: Sequence[int] = (),
        *,
        capture: bool = True,
    ) -> RunTasksRequest:
        """The training tasks of one step; in open traffic, only the number of groups. In a later
        round of dynamic sampling: replacement tasks for the groups at `places`.
        """
        config = self._config
        return RunTasksRequest(
            context=leased(config.security, config.run.id, step, epoch),
            purpose=trajectory_pb2.PURPOSE_TRAIN,
            tasks=[] if config.open_traffic else self._step_tasks(step, round_number, places),
            open_groups=config.prompts_per_step if config.open_traffic else 0,
            samples_per_task=config.samples_per_task,
            sampling=trajectory_pb2.SamplingParams(
                temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens
            ),
            run_seed=config.run.seed,
            environment=config.environment,
            reward=config.reward,
            capture=capture,
            turn_discount=config.turn_discount,
            silence_s=config.step_deadline_s / 2,
        )

    def _draw(self, step: int, count: int, seed: int, without: Collection[str] = ()) -> list[Task]:
        """Distinct tasks, with `count` tasks per step. Where a step spans two epochs, a task
        already drawn is replaced by the next task.
        """
        stage = self._stage(step)
        assert stage.tasks is not None
        drawn: dict[str, Task] = {}
        for task in draw_tasks(stage.tasks, seed, (step - stage.from_step) * count):
            if task.task_id not in without:
                drawn.setdefault(task.task_id, task)
            if len(drawn) == count:
                break
        return list(drawn.values())

    def _stage(self, step: int) -> Stage:
        return next(stage for stage in reversed(self._stages) if step >= stage.from_step)

    def _step_tasks(
        self, step: int, round_number: int, places: Sequence[int]
    ) -> list[rollout_pb2.TaskSpec]:
        config = self._config
        count, seed = config.prompts_per_step, config.run.seed
        drawn = self._draw(step, count, seed)
        if not round_number:
            return task_specs(enumerate(drawn), f"s{step}")
        # One replacement task for each place in each round. The replacements have their own order,
        # so the tasks of later steps do not depend on their number.
        most = count * config.dynamic_sampling_rounds
        others = self._draw(step, most, seed + OTHERS_SEED, {task.task_id for task in drawn})
        begin = (round_number - 1) * count
        chosen = [(place, others[begin + place]) for place in places]
        return task_specs(chosen, f"s{step}.r{round_number}")

    def evaluation_request(
        self, kind: Evaluation, finished_steps: int, epoch: int
    ) -> RunTasksRequest:
        """Held-out tasks. Step 0 in the context gives every evaluation of a run the same request
        seeds.
        """
        config, evaluation = self._config, self._config.evaluation
        environment, reward = config.evaluated_by
        probe = kind is Evaluation.PROBE
        heldout = self._stage(max(finished_steps - 1, 0)).heldout  # of the step that has just ended
        tasks = heldout[: evaluation.probe_prompts if probe else evaluation.heldout_prompts]
        return RunTasksRequest(
            context=leased(config.security, config.run.id, 0, epoch),
            purpose=trajectory_pb2.PURPOSE_EVAL,
            tasks=task_specs(enumerate(tasks), f"{kind.value}-{finished_steps}-{epoch}"),
            samples_per_task=1 if probe else evaluation.samples,
            sampling=self._evaluation_sampling(probe=probe),
            run_seed=EVALUATION_SEED,
            environment=environment,
            reward=reward,
            forced_arm=evaluation.probe_arm if probe else "",
            silence_s=config.step_deadline_s / 2,
        )

    def _evaluation_sampling(self, *, probe: bool) -> trajectory_pb2.SamplingParams:
        """The probe samples as in training, at temperature 1."""
        evaluation, most = self._config.evaluation, self._config.sampling.max_tokens
        if probe:
            return trajectory_pb2.SamplingParams(temperature=1.0, max_tokens=most)
        return trajectory_pb2.SamplingParams(
            temperature=evaluation.temperature,
            top_p=evaluation.top_p if evaluation.top_p < 1 else 0.0,
            max_tokens=evaluation.max_tokens or most,
        )


def _heldout(config: CoordinatorConfig, path: str) -> Sequence[Task]:
    """The tasks of evaluations. Raises ConfigError when they may exceed the samples of one call."""
    if not path:
        return []
    python, evaluation = config.run.verifiers_python, config.evaluation
    tasks = TaskFile(path, columns=config.columns, python=python)
    most = max(evaluation.heldout_prompts, evaluation.probe_prompts)
    setting = "coordinator.evaluation.heldout_prompts"
    tasks.check_call(setting, most, among=most, most_bytes=MOST_TASK_BYTES)
    return tasks


def _enough(config: CoordinatorConfig, path: str) -> TaskFile:
    """The training tasks of a file. Raises ConfigError when a step needs more."""
    own = config.task_filter
    keep = import_filter(own, "task filter") if own else None
    tasks = TaskFile(path, keep, config.columns, config.run.verifiers_python)
    if len(tasks) < config.prompts_per_step:
        message = f"{path} has too few tasks"
        raise ConfigError(message, seen=config.prompts_per_step, allowed=f"1..{len(tasks)}")
    rounds = config.dynamic_sampling_rounds
    if len(tasks) < config.prompts_per_step * (1 + rounds):
        raise ConfigError(
            f"{path} has too few tasks for coordinator.dynamic_sampling_rounds: a step may draw "
            f"{config.prompts_per_step} in each round, all different",
            seen=rounds,
            allowed=f"0..{len(tasks) // config.prompts_per_step - 1}",
        )
    setting = "coordinator.prompts_per_step"
    tasks.check_call(setting, config.prompts_per_step, most_bytes=MOST_TASK_BYTES)
    return tasks


_ASSIGN_DEADLINE_S = 30.0


@dataclass(eq=False)
class GroupsOfStep:
    """A step that needs groups."""

    rollouts: Sequence[Any]  # the stubs of the gateways
    context: trajectory_pb2.CommandContext
    wanted: int
    assigned: dict[int, int] = field(default_factory=dict)  # by gateway
    whole: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lacking(self) -> int:
        """Number of missing groups."""
        return self.wanted - sum(self.assigned.values())

    async def assign(self, number: int, most: int, *, last: bool = False) -> None:
        """Assigns up to `most` closed groups of a gateway; `last` ends its RunTasks call."""
        request = rollout_pb2.AssignGroupsRequest(context=self.context, most=most, last=last)
        with rpc_errors():
            answer = await self.rollouts[number].AssignGroups(request, timeout=_ASSIGN_DEADLINE_S)
        self.assigned[number] = answer.assigned
        if self.lacking <= 0:
            self.whole.set()


class OpenSteps:
    """The steps of one run: each gets the requested number of groups, the earliest step first. One
    step at a time gets groups, so no step gets too many.
    """

    def __init__(self) -> None:
        self._steps: list[GroupsOfStep] = []
        self._turn = asyncio.Lock()

    async def begin(self, rollouts: Sequence[Any], request: RunTasksRequest) -> GroupsOfStep:
        """A step, with the groups of earlier calls for it. Raises errors of the gateways."""
        step = GroupsOfStep(rollouts, request.context, request.open_groups)
        async with self._turn:
            for number in range(len(rollouts)):
                await step.assign(number, 0)
        return step

    async def collect(self, step: GroupsOfStep) -> None:
        """Returns when a step has all its groups and every gateway has recorded them. Raises errors
        of the gateways.
        """
        self._steps.append(step)
        self._steps.sort(key=lambda one: one.context.step)
        numbers = range(len(step.rollouts))
        watches = [asyncio.create_task(self._watch(step.rollouts, number)) for number in numbers]
        whole = asyncio.create_task(step.whole.wait())
        try:
            done, _ = await asyncio.wait({whole, *watches}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._steps.remove(step)
            async with self._turn:  # an assignment that is cut off would not be counted
                for task in (whole, *watches):
                    task.cancel()
            await asyncio.gather(whole, *watches, return_exceptions=True)
        async with self._turn:
            for number in numbers:
                await step.assign(number, 0, last=True)
        for number in numbers:  # groups that waited for a later step
            await self._share_out(number)

    async def _watch(self, rollouts: Sequence[Any], number: int) -> None:
        """Shares out the groups that close at a gateway, until cancelled."""
        with rpc_errors():
            call = rollouts[number].WatchGroups(rollout_pb2.WatchGroupsRequest())
            async with aclosing(responses(call)) as news:
                async for _ in news:
                    await self._share_out(number)

    async def _share_out(self, number: int) -> None:
        async with self._turn:
            for step in [*self._steps]:
                if step.lacking > 0:
                    await step.assign(number, step.lacking)
