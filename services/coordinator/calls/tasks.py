"""Draws the tasks of steps and evaluations, as RunTasks requests with their group ids.

A step's tasks depend on the run's seed and the step alone, so a restarted coordinator asks for the
same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.config import CoordinatorConfig
from coordinator.machine.state import Evaluation
from paceline.errors import ConfigError
from paceline.rpc import leased
from paceline.tasks import Task, TaskCursor, read_tasks
from paceline.v1.rollout_pb2 import RunTasksRequest, TaskSpec
from paceline.v1.trajectory_pb2 import PURPOSE_EVAL, PURPOSE_TRAIN, SamplingParams

EVALUATION_SEED = 20_000
"""One for all evaluations, so that their values can be compared between steps and runs."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The tasks from one step on."""

    from_step: int
    tasks: list[Task]
    heldout: list[Task]


class TaskSource:
    """Training tasks step by step, held-out tasks for evaluations."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Raises TaskFileError (InvalidInput) for a file that cannot be used, ConfigError for too
        few tasks.
        """
        self._config = config
        later = config.later
        tasks = [] if config.open_traffic else _enough(config, config.tasks_path)
        self._stages = [Stage(0, tasks, _tasks(config.heldout_path))]
        if later.from_step:
            heldout = _tasks(later.heldout_path) or self._stages[0].heldout
            self._stages.append(Stage(later.from_step, _enough(config, later.tasks_path), heldout))

    @property
    def samples_per_step(self) -> int:
        """Samples that a step asks for; 0 in open traffic, where agents decide."""
        return (
            0
            if self._config.open_traffic
            else self._config.prompts_per_step * self._config.samples_per_task
        )

    def step_request(self, step: int, epoch: int) -> RunTasksRequest:
        """The training tasks of one step; in open traffic none, but the number of groups it
        takes.
        """
        config = self._config
        return RunTasksRequest(
            context=leased(config.security, config.run.id, step, epoch),
            purpose=PURPOSE_TRAIN,
            tasks=[] if config.open_traffic else _specs(self._draw(step), f"s{step}"),
            open_groups=config.prompts_per_step if config.open_traffic else 0,
            samples_per_task=config.samples_per_task,
            sampling=SamplingParams(
                temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens
            ),
            run_seed=config.run.seed,
            environment=config.environment,
            reward=config.reward,
            capture=config.drafter_enabled,
        )

    def _stage(self, step: int) -> Stage:
        return next(stage for stage in reversed(self._stages) if step >= stage.from_step)

    def _draw(self, step: int) -> list[Task]:
        """Distinct tasks: where a step spans two epochs, one drawn already gives way to the
        next.
        """
        count, stage = self._config.prompts_per_step, self._stage(step)
        cursor = TaskCursor(stage.tasks, self._config.run.seed, (step - stage.from_step) * count)
        drawn: dict[str, Task] = {}
        while len(drawn) < count:
            task = cursor.draw(1)[0]
            drawn.setdefault(task.task_id, task)
        return list(drawn.values())

    def evaluation_request(
        self, kind: Evaluation, finished_steps: int, epoch: int
    ) -> RunTasksRequest:
        """Held-out tasks; step 0 in the context gives every evaluation of a run the same request
        seeds.
        """
        config, evaluation = self._config, self._config.evaluation
        environment, reward = config.evaluated_by
        probe = kind is Evaluation.PROBE
        heldout = self._stage(max(finished_steps - 1, 0)).heldout  # of the step that has just ended
        tasks = heldout[: evaluation.probe_prompts if probe else evaluation.heldout_prompts]
        return RunTasksRequest(
            context=leased(config.security, config.run.id, 0, epoch),
            purpose=PURPOSE_EVAL,
            tasks=_specs(tasks, f"{kind.value}-{finished_steps}-{epoch}"),
            samples_per_task=1,
            sampling=SamplingParams(temperature=1.0, max_tokens=config.sampling.max_tokens),
            run_seed=EVALUATION_SEED,
            environment=environment,
            reward=reward,
            forced_arm=evaluation.probe_arm if probe else evaluation.forced_arm,
        )


def _tasks(path: str) -> list[Task]:
    return read_tasks(path) if path else []


def _enough(config: CoordinatorConfig, path: str) -> list[Task]:
    """The training tasks of a file. Raises ConfigError when a step needs more."""
    tasks = read_tasks(path)
    if len(tasks) < config.prompts_per_step:
        raise ConfigError(
            f"{path} has too few tasks", seen=config.prompts_per_step, allowed=f"1..{len(tasks)}"
        )
    return tasks


def _specs(tasks: Sequence[Task], group: str) -> list[TaskSpec]:
    return [
        TaskSpec(
            task_id=task.task_id,
            prompt=task.prompt,
            answer=task.answer,
            group_id=f"{group}.t{index}",
            task_index=index,
            metadata=task.metadata,
        )
        for index, task in enumerate(tasks)
    ]
