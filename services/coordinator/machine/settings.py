"""The machine's settings: overlap of tracks, and division of slots."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen:
    """Base class of frozen dataclasses: each subclass is one, without a decorator."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Schedule(StrEnum):
    """Permitted distance of rollouts ahead of the trained policy."""

    SYNC = "sync"  # none
    ONE_STEP_OFF = "one_step_off"  # one step; a trajectory has one version
    FULLY_ASYNC = "fully_async"  # max_policy_lag versions; sets are committed among rollouts


class Placement(StrEnum):
    """Whether rollouts and policy have separate slots."""

    COLOCATED = "colocated"  # policy and engines take turns on all slots
    DISAGGREGATED = "disaggregated"


class CommitMode(StrEnum):
    """Treatment of running requests when a set is committed."""

    IN_PLACE = "in_place"  # requests keep keys and values
    RETRACT = "retract"  # keys and values are computed again
    ABORT = "abort"  # requests end, and continue from their tokens


KEPT = {
    "workers": "gateway.engine.workers",
    "leasable_workers": "workers of the first of several gateways",
    "slots_per_worker": "coordinator.slots_per_worker",
    "learner_slots": "coordinator.learner_slots",
    "placement": "coordinator.placement",
    "schedule": "coordinator.schedule",
    "max_policy_lag": "coordinator.max_policy_lag",
    "groups_per_step": "coordinator.prompts_per_step",
    "samples_per_group": "coordinator.samples_per_task",
    "dynamic_sampling_rounds": "coordinator.dynamic_sampling_rounds",
    "tasks": "coordinator.tasks_path",
}
"""Settings fixed for a run, since its state depends on them: field of RunSettings, and the
configuration key.
"""


class RunSettings(Frozen):
    """The machine's settings, journaled with RunStarted so that a replay needs no configuration."""

    workers: int = 1
    slots_per_worker: int = 1
    leasable_workers: int = 0  # the first ones, on the drafter's host; 0: all
    total_steps: int = 1
    training_interval_steps: int = 10
    max_drafter_slots: int = 1
    drafter_enabled: bool = True
    train_during_push: bool = False  # the drafter trains on slots that the policy has left
    serial_drafter: bool = False  # train between policy step and commit instead of idle slots
    accuracy_enabled: bool = False
    accuracy_every: int = 0  # RL steps; 0: at start and end only
    probe_enabled: bool = False
    probe_every: int = 10  # RL steps; 0: at start and end only
    schedule: Schedule = Schedule.SYNC
    placement: Placement = Placement.COLOCATED
    max_policy_lag: int = 0  # steps that rollouts may be ahead of the serving policy
    learner_slots: int = 0  # slots of the policy alone, after the workers' slots
    commit_mode: CommitMode = CommitMode.IN_PLACE
    groups_per_step: int = 1
    samples_per_group: int = 1  # requested samples
    dynamic_sampling_rounds: int = 0  # rounds of other tasks for groups of equal rewards; 0: none
    profile_stays: bool = False  # the engine keeps the profile of its start
    tasks: str = ""  # number and hash of the tasks; empty: agents bring tasks

    @property
    def engine_slots(self) -> int:
        """Number of workers' slots: worker w has [w * slots_per_worker, (w + 1) *
        slots_per_worker).
        """
        return self.workers * self.slots_per_worker

    @property
    def slots(self) -> int:
        """Number of slots: the workers', then the learner's own."""
        return self.engine_slots + self.learner_slots

    @property
    def colocated(self) -> bool:
        """Whether the policy trains on the workers' slots."""
        return self.placement is Placement.COLOCATED

    @property
    def takes_turns(self) -> bool:
        """Whether no rollout runs between a batch and the commit of its policy."""
        return self.colocated and self.schedule is Schedule.SYNC

    @property
    def policy_slots(self) -> range:
        """Slots that the policy trains on."""
        return range(0 if self.colocated else self.engine_slots, self.slots)

    def worker_slots(self, worker: int) -> tuple[int, ...]:
        """Slots of one worker."""
        first = worker * self.slots_per_worker
        return tuple(range(first, first + self.slots_per_worker))
