"""Declares the settings of the coordinator: names, defaults and ranges."""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.config import Config, ServiceConfig, Temperature
from paceline.errors import ConfigError
from paceline.services.coordinator.machine import settings
from paceline.services.coordinator.trackers import TrackerName, check_trackers
from paceline.tasks import MAX_SAMPLES, Columns, scores_itself
from paceline.tasks.verifiers import is_environment
from paceline.trajectory import TEMPERATURE

EXTERNAL = "external"
"""Name of the environment in which external agents run the tasks."""
AGENT = "agent"
"""Name of the reward rule for rewards posted by the agent."""


TRAIN_DURING_PUSH = True
"""Whether the drafter trains on the policy's slots during the push, in the schedule sync,
colocated.
"""


class SamplingConfig(Config):
    """Sampling of training rollouts."""

    temperature: float = Field(default=1.0, ge=TEMPERATURE.low, le=TEMPERATURE.high)
    """Softmax temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """Maximum tokens of a response."""


class EvaluationConfig(Config):
    """Evaluations outside the timed steps, with fixed seeds."""

    heldout_prompts: int = Field(default=512, ge=1)
    """Number of held-out prompts for the accuracy, from the beginning of heldout_path."""
    samples: int = Field(default=1, ge=1)
    """Samples per prompt: the accuracy is avg@k, with pass@2, pass@4 and so on."""
    temperature: Temperature = 1.0
    """Softmax temperature of the evaluation's samples; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass of the evaluation's samples."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of such a response; empty: as in training."""
    solved_above: float = 0.5
    """Reward above which a sample solves its task."""
    every: int = Field(default=0, ge=0)
    """RL steps between two accuracies; 0: only at the start and the end."""
    probe_prompts: int = Field(default=64, ge=0)
    """Number of held-out prompts of the acceptance probe; 0: no probe."""
    probe_every: int = Field(default=10, ge=0)
    """RL steps between two probes; 0: only at the start and the end."""
    probe_arm: str = "eagle:5_1_6"
    """Arm of the probe; engines without it are not probed."""
    environment: str = ""
    """Environment of evaluations; empty: the run's."""
    reward: str = ""
    """Reward rule of evaluations; empty: the run's."""


class TaskColumnsConfig(Config):
    """Column names of the task files; `a.b` is field b of column a. Empty: the usual names (prompt
    and answer, messages, or question and answer).
    """

    prompt: str = ""
    """Prompt: text, or a list of messages."""
    answer: str = ""
    """Reference for rewards: text or a number."""
    task_id: str = ""
    """Unique name of the task: text or a whole number."""
    system: str = ""
    """System message; empty: column "system", if present."""


class LaterConfig(Config):
    """Other tasks from a step on: a stage of a curriculum, or a deliberate shift of the policy's
    texts.
    """

    tasks_path: str
    """Training tasks, as in `coordinator.tasks_path`."""
    heldout_path: str = ""
    """Held-out tasks of later evaluations; empty: the same as before."""


class CoordinatorConfig(ServiceConfig):
    """The run: its steps, tasks and slots."""

    steps: int = Field(default=200, ge=0)
    """Number of RL steps."""
    tasks_path: str = ""
    """Training tasks: .jsonl, .parquet or reasoning_gym:FAMILY,FAMILY. Empty with environment
    "external": agents bring their own tasks (open traffic). Empty with "verifiers:ID": the
    environment's own dataset.
    """
    heldout_path: str = ""
    """Held-out tasks, such as "verifiers:ID#eval"; empty: no evaluations."""
    task_columns: TaskColumnsConfig = TaskColumnsConfig()
    system_prompt: str = ""
    """System message of tasks without their own. The prompt is then a conversation under the chat
    template.
    """
    later: dict[Annotated[int, Field(ge=1)], LaterConfig] = Field(default={})
    """Stages of a curriculum: the first RL step of each, with its `tasks_path` and `heldout_path`
    (empty: as before).
    """
    task_filter: str = ""
    """Your own filter of training tasks, module:function or file.py:function, called once per task.
    It returns True for tasks to draw. Empty: all tasks.
    """
    prompts_per_step: int = Field(default=16, ge=1)
    """Tasks per step; in open traffic the number of closed groups per step."""
    samples_per_task: int = Field(default=8, ge=2)
    """Samples per task, the group size. In open traffic agents set their groups' sizes."""
    dynamic_sampling_rounds: int = Field(default=0, ge=0, le=64)
    """Maximum rounds of DAPO's dynamic sampling, which replaces groups with equal rewards by other
    tasks. Groups without variance after the last round are dropped, so the step trains fewer
    groups. 0: all groups are kept.
    """
    sampling: SamplingConfig = SamplingConfig()
    environment: str = "single_turn"
    """Environment of the tasks in the gateway; "external": external agents run them;
    "verifiers:ID": one of the package verifiers; "openenv:URL": an OpenEnv server.
    """
    reward: str = "math_answer"
    """Reward rule in the gateway; "agent": the agent posts the reward. Default of "verifiers:ID"
    and "openenv:URL", whose reward is their own: "agent".
    """
    turn_discount: float | None = Field(default=None, ge=0, le=1)
    """Discount of later rewards in a task's session: each turn is a training sample of its own,
    with the return R_t = r_t + turn_discount * R_(t+1). Empty: a branch is one sample, with the sum
    of its rewards. Of agents' own tasks, the session's opener decides.
    """
    slots_per_worker: int = Field(default=1, ge=1)
    """Slots per worker: its tensor parallel size."""
    drafter_enabled: bool = True
    """Whether the drafter trains on released slots; false: no drafter trainer."""
    drafter_schedule: Literal["harvest", "serial"] = "harvest"
    """Time of the drafter's training. harvest: on slots that rollouts leave idle; serial: after the
    policy step, while other services wait.
    """
    schedule: settings.Schedule = settings.Schedule.SYNC
    """Lead of rollouts over the policy. sync: none; one_step_off: the step in training;
    fully_async: up to max_policy_lag versions, with commits during rollouts.
    """
    placement: settings.Placement = settings.Placement.COLOCATED
    """colocated: rollouts and policy take turns on all slots; disaggregated: the policy has its own
    learner_slots.
    """
    max_policy_lag: int | None = Field(default=None, ge=0)
    """Maximum versions between the oldest token of a group and the trained policy; older groups are
    dropped. Empty: 0 in sync, else 1.
    """
    learner_slots: int = Field(default=0, ge=0)
    """Slots of a disaggregated policy."""
    commit_mode: settings.CommitMode = settings.CommitMode.IN_PLACE
    """Effect of a commit on running requests. in_place: continue with their keys and values;
    retract: continue with recomputed keys and values; abort: end, and restart from their tokens.
    """
    profile_stays: bool = False
    """Whether sets keep the profile of the start, also one that the audit finds inexact. `paceline`
    sets it for an SGLang engine with a profile.
    """
    training_interval_steps: int = Field(default=10, ge=1)
    """RL steps between two trainings of the drafter."""
    max_drafter_slots: int = Field(default=1, ge=1)
    """Maximum slots leased to the drafter."""
    max_drafter_steps: int = Field(default=0, ge=0)
    """Maximum optimiser steps per activation; 0: no limit."""
    snapshot_entries: ClassVar[int] = 1000
    """Journal entries after which the end of a step writes a snapshot; a restarted coordinator
    replays the later entries.
    """
    step_deadline_s: float = Field(default=900.0, gt=0)
    """Maximum time without progress of rollouts, a policy step or an evaluation before the run
    fails, seconds. In open traffic, rollouts last until enough groups have closed.
    """
    group_deadline_s: ClassVar[float] = 600.0
    """Time after which a group is trained without its missing siblings, seconds."""
    service_recovery_s: float = Field(default=120.0, gt=0)
    """Maximum absence of a service, or time without progress, before the run fails, seconds."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that receive every step: tensorboard, wandb, trackio (pip install
    tensorboardX, wandb, trackio).
    """
    stall_alarm_s: float = Field(default=30.0, ge=0)
    """Time without progress before console, log and a metric report the waiting services, seconds.
    The machine's load stretches it. 0: never.
    """
    evaluation: EvaluationConfig = EvaluationConfig()
    rollback_drop: ClassVar[float] = 0.3
    """Maximum loss of live acceptance length of a new drafter against its predecessor between two
    RL steps, tokens; beyond it the predecessor serves again. 0: no rollback.
    """

    @model_validator(mode="before")
    @classmethod
    def _of_environment(cls, given: Any) -> Any:
        """Environments of verifiers and OpenEnv have own rewards, those of verifiers also tasks."""
        name = str(given.get("environment", "")) if isinstance(given, dict) else ""
        if not scores_itself(name):
            return given
        own = {"tasks_path": name} if is_environment(name) else {}
        return {**own, "reward": AGENT, **given}

    @property
    def columns(self) -> Columns:
        """Columns of the task file for each part of a task."""
        return Columns(**self.task_columns.model_dump(), system_prompt=self.system_prompt)

    @property
    def open_traffic(self) -> bool:
        """Whether a step trains the groups of agents that bring their own tasks."""
        return self.environment == EXTERNAL and not self.tasks_path

    def check(self) -> None:
        """Raises ConfigError for settings that cannot work together."""
        if not self.tasks_path and self.environment != EXTERNAL:
            message = "the coordinator has no training tasks; set coordinator.tasks_path"
            seen = f"coordinator.environment={self.environment}"
            allowed = f"no tasks with coordinator.environment={EXTERNAL} only"
            raise ConfigError(message, seen=seen, allowed=allowed)

        if self.open_traffic and self.dynamic_sampling_rounds:
            message = "in open traffic nobody can draw other tasks for groups of equal rewards"
            seen = f"coordinator.dynamic_sampling_rounds={self.dynamic_sampling_rounds}"
            raise ConfigError(message, seen=seen, allowed="0, or tasks_path")
        if self.open_traffic and self.later:
            raise ConfigError("coordinator.later needs coordinator.tasks_path", seen="''")
        _check_reward("coordinator", self.environment, self.reward)
        if self.evaluation.samples > 1 and self.evaluation.temperature == 0:
            message = "greedy samples of a task are all the same; coordinator.evaluation.samples"
            allowed = "1, or coordinator.evaluation.temperature above 0"
            raise ConfigError(message, seen=self.evaluation.samples, allowed=allowed)
        check_trackers(self.trackers)
        self._check_tracks()
        self._check_samples()
        if not self.heldout_path:
            return
        environment, reward = self.evaluated_by
        if self.open_traffic and environment == EXTERNAL:
            raise ConfigError(
                "in open traffic nobody claims held-out tasks; set "
                "coordinator.evaluation.environment",
                seen=environment,
                allowed="an environment of the gateway, e.g. single_turn",
            )

        _check_reward("coordinator.evaluation", environment, reward)

    def _check_samples(self) -> None:
        """Raises ConfigError when one call would request more than MAX_SAMPLES samples."""
        evaluation = self.evaluation
        step = self.prompts_per_step * self.samples_per_task
        heldout = evaluation.heldout_prompts * evaluation.samples
        for samples, product in (
            (step, "prompts_per_step x samples_per_task"),
            (heldout, "evaluation.heldout_prompts x evaluation.samples"),
        ):
            if samples > MAX_SAMPLES:
                message = f"too many samples at once: coordinator.{product}"
                raise ConfigError(message, seen=samples, allowed=f"1..{MAX_SAMPLES}")

    def _check_tracks(self) -> None:
        """Raises ConfigError for a schedule and a placement that contradict other settings."""
        schedule, lag = self.schedule, self.policy_lag
        fits, allowed = {
            settings.Schedule.SYNC: (lag == 0, "0"),
            settings.Schedule.ONE_STEP_OFF: (lag == 1, "1"),
            settings.Schedule.FULLY_ASYNC: (lag >= 1, ">= 1"),
        }[schedule]
        if not fits:
            message = f"coordinator.max_policy_lag does not fit coordinator.schedule={schedule}"
            raise ConfigError(message, seen=lag, allowed=allowed)
        colocated = self.placement is settings.Placement.COLOCATED
        if colocated != (self.learner_slots == 0):
            raise ConfigError(
                f"coordinator.learner_slots does not fit coordinator.placement={self.placement}",
                seen=self.learner_slots,
                allowed="0" if colocated else ">= 1",
            )
        serial = self.drafter_enabled and self.drafter_schedule == "serial"
        if serial and schedule is not settings.Schedule.SYNC:
            raise ConfigError(
                "a serial drafter trains while nothing is rolled out",
                seen=f"coordinator.schedule={schedule}",
                allowed="coordinator.schedule=sync, or drafter_schedule=harvest",
            )
        if self.open_traffic and schedule is settings.Schedule.FULLY_ASYNC:
            message = "in open traffic the groups of a step are those that agents bring to it"
            seen = f"coordinator.schedule={schedule}"
            raise ConfigError(message, seen=seen, allowed="sync or one_step_off, or tasks_path")

    @property
    def policy_lag(self) -> int:
        """Maximum versions between a group's oldest token and the trained policy."""
        if self.max_policy_lag is not None:
            return self.max_policy_lag
        return 0 if self.schedule is settings.Schedule.SYNC else 1

    @property
    def evaluated_by(self) -> tuple[str, str]:
        """Environment and reward of evaluations."""
        own = self.evaluation
        return own.environment or self.environment, own.reward or self.reward

    def machine_settings(self, workers: int) -> settings.RunSettings:
        """The machine's settings."""
        evaluated = bool(self.heldout_path)
        own = {field.name for field in fields(settings.RunSettings)}
        alike = own & CoordinatorConfig.model_fields.keys()
        return settings.RunSettings(
            workers=workers,
            total_steps=self.steps,
            train_during_push=TRAIN_DURING_PUSH,
            serial_drafter=self.drafter_schedule == "serial",
            accuracy_enabled=evaluated,
            accuracy_every=self.evaluation.every,
            probe_enabled=evaluated and self.evaluation.probe_prompts > 0,
            probe_every=self.evaluation.probe_every,
            groups_per_step=self.prompts_per_step,
            samples_per_group=self.samples_per_task,
            **{name: getattr(self, name) for name in alike} | {"max_policy_lag": self.policy_lag},
        )


def _check_reward(section: str, environment: str, reward: str) -> None:
    if is_environment(environment) and reward != AGENT:
        message = f"the rubric of an environment of verifiers scores: {section}.reward"
        raise ConfigError(message, seen=reward, allowed=AGENT)
    if reward == AGENT and environment != EXTERNAL and not scores_itself(environment):
        raise ConfigError(
            f"{section}.reward={AGENT} needs an agent to post it",
            seen=f"{section}.environment={environment}",
            allowed=f"{section}.environment={EXTERNAL} or another reward",
        )
