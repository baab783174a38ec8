"""Declares the settings of the coordinator: names, defaults and ranges."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field

from paceline.config import Config, ServiceConfig
from paceline.errors import ConfigError, InvalidInput
from paceline.models.profiles import check_profile
from paceline.services.coordinator.machine.settings import (
    CommitMode,
    Placement,
    RunSettings,
    Schedule,
)
from paceline.services.coordinator.trackers import TrackerName, check_trackers
from paceline.tasks import MAX_SAMPLES, Columns
from paceline.trajectory import LEAST_TEMPERATURE

EXTERNAL = "external"
"""Environment whose tasks are run by agents from outside."""
AGENT = "agent"
"""Reward that the agent posts itself."""


def _rounded(values: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(map(check_profile, values))
    except InvalidInput as error:  # pydantic adds where the setting stands
        raise ValueError(str(error)) from error


class Scoring(NamedTuple):
    """Who runs a task and who scores it, by the gateway's names."""

    environment: str
    reward: str


class SamplingConfig(Config):
    """How training samples are drawn."""

    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE, le=10)
    """Softmax temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens of a response at most."""


class EvaluationConfig(Config):
    """Evaluations, made outside the timed steps with fixed seeds."""

    heldout_prompts: int = Field(default=512, ge=1)
    """Held-out prompts for the accuracy: the first so many of heldout_path."""
    samples: int = Field(default=1, ge=1)
    """Samples of each: the accuracy is avg@k, and of several there is pass@2, pass@4 and so on."""
    temperature: float = Field(default=1.0, ge=0, le=10)
    """Softmax temperature of these samples; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass of these samples."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of such a response at most; empty: as in training."""
    solved_above: float = 0.5
    """Reward above which a sample has solved its task."""
    every: int = Field(default=0, ge=0)
    """RL steps between two accuracies; 0 measures at the start and the end only."""
    forced_arm: str = ""
    """Arm of the accuracy; empty lets the bandit choose."""
    probe_prompts: int = Field(default=64, ge=0)
    """Held-out prompts of the acceptance probe; 0 switches it off."""
    probe_every: int = Field(default=10, ge=0)
    """RL steps between two probes; 0 probes at the start and the end only."""
    probe_arm: str = "eagle:5_1_6"
    """Arm that the probe forces; engines without it are not probed."""
    environment: str = ""
    """Environment of evaluations; empty: the run's own."""
    reward: str = ""
    """Reward rule of evaluations; empty: the run's own."""


class TaskColumnsConfig(Config):
    """Which column of the task files holds what. Empty: the usual ones, of which a file has
    prompt and answer, messages, or question and answer. `a.b` is field b of column a.
    """

    prompt: str = ""
    """What is asked: text, or a list of messages."""
    answer: str = ""
    """What a reward compares with: text or a number."""
    task_id: str = ""
    """Unique name of the task: text or a whole number."""
    system: str = ""
    """What the conversation begins with; empty: column "system", where there is one."""


class LaterConfig(Config):
    """Other tasks from a step on: a second stage of a curriculum, or a deliberate shift of what the
    policy says.
    """

    from_step: int = Field(default=0, ge=0)
    """First RL step with these tasks; 0: never."""
    tasks_path: str = ""
    """Training tasks: .jsonl, .parquet, or a directory that datasets wrote with save_to_disk."""
    heldout_path: str = ""
    """Held-out tasks of evaluations from then on; empty keeps those of before."""


class CoordinatorConfig(ServiceConfig):
    """The run: how many steps of which tasks, and who may use the slots between."""

    steps: int = Field(default=200, ge=0)
    """RL steps of the run."""
    tasks_path: str = ""
    """Training tasks: .jsonl, .parquet, or a directory that datasets wrote with save_to_disk.

    Empty with environment "external": open traffic, agents bring their own.
    """
    heldout_path: str = ""
    """Held-out tasks; empty makes no evaluations."""
    task_columns: TaskColumnsConfig = TaskColumnsConfig()
    system_prompt: str = ""
    """Message of the system for every task that has none of its own; what is asked is then a
    conversation under the chat template.
    """
    later: LaterConfig = LaterConfig()
    task_filter: str = ""
    """Your own choice of training tasks, module:function or file.py:function: asked once of every
    task, it says True of those that are drawn. Empty: all.
    """
    prompts_per_step: int = Field(default=16, ge=1)
    """Tasks drawn for a step; in open traffic the groups that must close for one."""
    samples_per_task: int = Field(default=8, ge=2)
    """Samples of a task: the group size. In open traffic agents give their groups' sizes."""
    dynamic_sampling_rounds: int = Field(default=0, ge=0, le=64)
    """Rounds in which other tasks are drawn for groups whose samples all got the same reward, from
    which nothing is learned (DAPO's dynamic sampling). What is still without variance after the
    last round is left out too: the step then trains fewer groups. 0 keeps all groups.
    """
    sampling: SamplingConfig = SamplingConfig()
    environment: str = "single_turn"
    """Environment of the gateway that runs the tasks; "external": agents from outside do."""
    reward: str = "math_answer"
    """Reward rule of the gateway that scores them; "agent": the agent posts the reward itself."""
    slots_per_worker: int = Field(default=1, ge=1)
    """Slots that one worker holds: its tensor parallel size."""
    drafter_enabled: bool = True
    """Train the drafter on released slots; false needs no drafter trainer."""
    drafter_schedule: Literal["harvest", "serial"] = "harvest"
    """When the drafter trains: on slots that rollouts leave idle, or after the policy step while
    everybody waits.
    """
    schedule: Schedule = Schedule.SYNC
    """How far rollouts may be ahead of the policy: sync not at all, one_step_off by the step that
    is trained meanwhile, fully_async by max_policy_lag versions, with commits among rollouts.
    """
    placement: Placement = Placement.COLOCATED
    """colocated: rollouts and policy take turns on all slots; disaggregated: the policy has
    learner_slots of its own.
    """
    max_policy_lag: int | None = Field(default=None, ge=0)
    """Versions between the oldest token of a group and the policy that is trained on it; groups
    that are older are dropped. Empty: 0 in sync, else 1.
    """
    learner_slots: int = Field(default=0, ge=0)
    """Slots of the policy alone, where it is disaggregated."""
    commit_mode: CommitMode = CommitMode.IN_PLACE
    """What becomes of requests that run when a set is committed: they go on, with their keys and
    values (in_place) or new ones (retract), or are ended and go on from
    their tokens with new ones (abort).
    """
    profiles: Annotated[tuple[str, ...], AfterValidator(_rounded)] = ()
    """Profiles that an operator may have the policy rounded to while the run goes on (`paceline
    use-profile`), besides the one of the start and none.
    """
    profile_stays: bool = False
    """Sets keep the profile of the start, whatever an operator or the audit says, because the
    engine was started with it: `paceline` sets it where SGLang has one.
    """
    training_interval_steps: int = Field(default=10, ge=1)
    """The drafter trains in every so many RL steps."""
    frozen_interval_steps: ClassVar[int] = 5
    """RL steps from one look at a drafter whose training is frozen to the next; in between it gets
    no slots, and no rows are captured for it.
    """
    min_workers_for_training: int = Field(default=1, ge=1)
    """Workers that must be released before the drafter gets their slots."""
    train_during_push: bool = True
    """In the schedule sync, colocated: the drafter gets the slots that the policy has left while
    the policy's weights are pushed.
    """
    max_drafter_slots: int = Field(default=1, ge=1)
    """Slots leased to the drafter at most."""
    max_drafter_steps: int = Field(default=0, ge=0)
    """Optimiser steps of one activation at most; 0 for no limit."""
    activation_deadline_s: float = Field(default=30.0, gt=0)
    """Seconds until the drafter must train after its lease, on an idle machine."""
    snapshot_entries: int = Field(default=1000, ge=1)
    """Journal entries after which the end of a step writes a snapshot: a restarted coordinator
    replays what follows it.
    """
    preempt_deadline_s: float = Field(default=4.0, gt=0)
    """Seconds until the drafter must have given its slots back, on an idle machine."""
    step_deadline_s: float = Field(default=900.0, gt=0)
    """Seconds that the rollouts, the policy step or an evaluation may take before the run fails. In
    open traffic the rollouts last until enough groups have closed.
    """
    group_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds after which a group is trained without the siblings that are missing."""
    service_recovery_s: float = Field(default=120.0, gt=0)
    """Seconds that a service may be away, or answer without progress, before the run fails."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that are told of every step: tensorboard, wandb, trackio, each to be
    installed (pip install tensorboardX, wandb, trackio).
    """
    stall_alarm_s: float = Field(default=30.0, ge=0)
    """Seconds without progress, while work remains, after which console, log and a metric say who
    waits for whom; 0: never.
    """
    evaluation: EvaluationConfig = EvaluationConfig()
    rollback_drop: ClassVar[float] = 0.3
    """Tokens of live acceptance length that a new drafter may lose against the one before, from one
    RL step to the next, before that one serves again; 0 never rolls back.
    """

    @property
    def columns(self) -> Columns:
        """Where the parts of a task stand in its file."""
        return Columns(**self.task_columns.model_dump(), system_prompt=self.system_prompt)

    @property
    def open_traffic(self) -> bool:
        """Whether a step trains the groups of agents that bring their own tasks."""
        return self.environment == EXTERNAL and not self.tasks_path

    def check(self) -> None:
        """Raises ConfigError for settings that cannot work together."""
        if not self.tasks_path and self.environment != EXTERNAL:
            raise ConfigError(
                "the coordinator has no training tasks; set coordinator.tasks_path",
                seen=f"coordinator.environment={self.environment}",
                allowed=f"no tasks with coordinator.environment={EXTERNAL} only",
            )

        if self.open_traffic and self.dynamic_sampling_rounds:
            raise ConfigError(
                "in open traffic nobody can draw other tasks for groups of equal rewards",
                seen=f"coordinator.dynamic_sampling_rounds={self.dynamic_sampling_rounds}",
                allowed="0, or tasks_path",
            )
        if self.open_traffic and self.later.from_step:
            raise ConfigError("coordinator.later needs coordinator.tasks_path", seen="''")
        _check_reward("coordinator", self.environment, self.reward)
        if 0 < (seen := self.evaluation.temperature) < LEAST_TEMPERATURE:
            raise ConfigError("evaluation.temperature", seen=seen, allowed="0, or 1e-20 to 10")
        if self.evaluation.samples > 1 and self.evaluation.temperature == 0:
            raise ConfigError(
                "greedy samples of a task are all the same; coordinator.evaluation.samples",
                seen=self.evaluation.samples,
                allowed="1, or coordinator.evaluation.temperature above 0",
            )
        check_trackers(self.trackers)
        self._check_tracks()
        self._check_samples()
        if not self.heldout_path:
            return
        evaluation, section = self.evaluated_by, "coordinator.evaluation"
        if self.open_traffic and evaluation.environment == EXTERNAL:
            raise ConfigError(
                f"in open traffic nobody claims held-out tasks; set {section}.environment",
                seen=evaluation.environment,
                allowed="an environment of the gateway, e.g. single_turn",
            )

        _check_reward(section, evaluation.environment, evaluation.reward)

    def _check_samples(self) -> None:
        """Raises ConfigError for more samples at once than one call may ask for."""
        evaluation = self.evaluation
        for product, samples in (
            ("prompts_per_step x samples_per_task", self.prompts_per_step * self.samples_per_task),
            (
                "evaluation.heldout_prompts x evaluation.samples",
                evaluation.heldout_prompts * evaluation.samples,
            ),
        ):
            if samples > MAX_SAMPLES:
                raise ConfigError(
                    f"too many samples at once: coordinator.{product}",
                    seen=samples,
                    allowed=f"1..{MAX_SAMPLES}",
                )

    def _check_tracks(self) -> None:
        """Raises ConfigError for a schedule and a placement that contradict other settings."""
        schedule, lag = self.schedule, self.policy_lag
        fits, allowed = {
            Schedule.SYNC: (lag == 0, "0"),
            Schedule.ONE_STEP_OFF: (lag == 1, "1"),
            Schedule.FULLY_ASYNC: (lag >= 1, ">= 1"),
        }[schedule]
        if not fits:
            raise ConfigError(
                f"coordinator.max_policy_lag does not fit coordinator.schedule={schedule}",
                seen=lag,
                allowed=allowed,
            )
        colocated = self.placement is Placement.COLOCATED
        if colocated != (self.learner_slots == 0):
            raise ConfigError(
                f"coordinator.learner_slots does not fit coordinator.placement={self.placement}",
                seen=self.learner_slots,
                allowed="0" if colocated else ">= 1",
            )
        if schedule is not Schedule.SYNC:
            self._check_ahead()

    def _check_ahead(self) -> None:
        """Raises ConfigError for what cannot be while rollouts are ahead of the learner."""
        schedule = self.schedule
        if self.drafter_enabled and self.drafter_schedule == "serial":
            raise ConfigError(
                "a serial drafter trains while nothing is rolled out",
                seen=f"coordinator.schedule={schedule}",
                allowed=f"coordinator.schedule={Schedule.SYNC}, or drafter_schedule=harvest",
            )
        if schedule is Schedule.ONE_STEP_OFF:
            return
        if self.open_traffic:
            raise ConfigError(
                "in open traffic the groups of a step are those that agents bring to it",
                seen=f"coordinator.schedule={schedule}",
                allowed=f"{Schedule.SYNC} or {Schedule.ONE_STEP_OFF}, or tasks_path",
            )

    @property
    def policy_lag(self) -> int:
        """Versions that a group may be older than the policy."""
        if self.max_policy_lag is not None:
            return self.max_policy_lag
        return 0 if self.schedule is Schedule.SYNC else 1

    @property
    def evaluated_by(self) -> Scoring:
        """Environment and reward of evaluations."""
        return Scoring(
            self.evaluation.environment or self.environment, self.evaluation.reward or self.reward
        )

    def machine_settings(self, workers: int) -> RunSettings:
        """What the machine decides by."""
        evaluated = bool(self.heldout_path)
        return RunSettings(
            workers=workers,
            slots_per_worker=self.slots_per_worker,
            total_steps=self.steps,
            training_interval_steps=self.training_interval_steps,
            min_workers_for_training=self.min_workers_for_training,
            max_drafter_slots=self.max_drafter_slots,
            drafter_enabled=self.drafter_enabled,
            frozen_interval_steps=self.frozen_interval_steps,
            train_during_push=self.train_during_push,
            serial_drafter=self.drafter_schedule == "serial",
            activation_deadline_s=self.activation_deadline_s,
            preempt_deadline_s=self.preempt_deadline_s,
            accuracy_enabled=evaluated,
            accuracy_every=self.evaluation.every,
            probe_enabled=evaluated and self.evaluation.probe_prompts > 0,
            probe_every=self.evaluation.probe_every,
            schedule=self.schedule,
            placement=self.placement,
            max_policy_lag=self.policy_lag,
            learner_slots=self.learner_slots,
            commit_mode=self.commit_mode,
            groups_per_step=self.prompts_per_step,
            samples_per_group=self.samples_per_task,
            dynamic_sampling_rounds=self.dynamic_sampling_rounds,
            profiles=self.profiles,
            profile_stays=self.profile_stays,
        )


def _check_reward(section: str, environment: str, reward: str) -> None:
    if reward == AGENT and environment != EXTERNAL:
        raise ConfigError(
            f"{section}.reward={AGENT} needs an agent to post it",
            seen=f"{section}.environment={environment}",
            allowed=f"{section}.environment={EXTERNAL} or another reward",
        )
