"""The tasks of steps and evaluations as RunTasks requests. Owns which tasks a step gets and their group ids.

A step's tasks depend on the run's seed and the step alone, so a restarted coordinator asks for the same again.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.config import CoordinatorConfig
from coordinator.state import Evaluation
from paceline.tasks import Task, TaskCursor, read_tasks
from paceline.v1.rollout_pb2 import RunTasksRequest, TaskSpec
from paceline.v1.trajectory_pb2 import PURPOSE_EVAL, PURPOSE_TRAIN, CommandContext, SamplingParams


class TaskSource:
    """Training tasks step by step, held-out tasks for evaluations."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Raises TaskFileError (InvalidInput) for a file that cannot be used."""
        self._config = config
        self._tasks = read_tasks(config.tasks_path)
        self._heldout = read_tasks(config.heldout_path) if config.heldout_path else []

    @property
    def samples_per_step(self) -> int:
        """Samples that a step asks for."""
        return self._config.prompts_per_step * self._config.samples_per_task

    def step_request(self, step: int, epoch: int) -> RunTasksRequest:
        """The training tasks of one step."""
        config = self._config
        cursor = TaskCursor(self._tasks, config.run.seed, step * config.prompts_per_step)
        return RunTasksRequest(
            context=CommandContext(run_id=config.run.id, step=step, epoch=epoch),
            purpose=PURPOSE_TRAIN,
            tasks=_specs(cursor.draw(config.prompts_per_step), f"s{step}"),
            samples_per_task=config.samples_per_task,
            sampling=SamplingParams(temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens),
            run_seed=config.run.seed,
            environment=config.environment,
            reward=config.reward,
            capture=config.drafter_enabled,
        )

    def evaluation_request(self, kind: Evaluation, finished_steps: int, epoch: int) -> RunTasksRequest:
        """Held-out tasks; step 0 in the context gives every evaluation of a run the same request seeds."""
        config, evaluation = self._config, self._config.evaluation
        probe = kind is Evaluation.PROBE
        tasks = self._heldout[: evaluation.probe_prompts if probe else evaluation.heldout_prompts]
        return RunTasksRequest(
            context=CommandContext(run_id=config.run.id, step=0, epoch=epoch),
            purpose=PURPOSE_EVAL,
            tasks=_specs(tasks, f"{kind.value}-{finished_steps}-{epoch}"),
            samples_per_task=1,
            sampling=SamplingParams(temperature=1.0, max_tokens=config.sampling.max_tokens),
            run_seed=evaluation.seed,
            environment=config.environment,
            reward=config.reward,
            forced_arm=evaluation.probe_arm if probe else evaluation.forced_arm,
        )


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
