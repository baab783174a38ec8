"""Holds the settings that the machine decides by: how tracks may overlap, who has which slots."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    """How far rollouts may be ahead of the policy that is trained."""

    SYNC = "sync"  # not at all
    ONE_STEP_OFF = "one_step_off"  # one step; a trajectory has one version
    FULLY_ASYNC = "fully_async"  # max_policy_lag versions; sets are committed among rollouts


class Placement(StrEnum):
    """Whether rollouts and policy have slots of their own."""

    COLOCATED = "colocated"  # they take turns on all slots
    DISAGGREGATED = "disaggregated"


class CommitMode(StrEnum):
    """What becomes of requests that run when a set is committed."""

    IN_PLACE = "in_place"  # they go on with the keys and values that they have
    RETRACT = "retract"  # they go on with keys and values made anew
    ABORT = "abort"  # they are ended, and go on from their tokens


KEPT = {
    "workers": "gateway.engine.most_workers",
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
"""What a run keeps from its begin to its end, since its state is counted in it: field of
RunSettings, and the setting that it comes from.
"""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the machine decides by; journaled with RunStarted so that a replay needs no config."""

    workers: int = 1  # places of them
    vacant: int = 0  # places that have none at the begin, a bit each
    elastic: bool = False  # workers may join and leave
    elsewhere: int = 0  # places on other hosts than the gateway's, a bit each: never leased
    slots_per_worker: int = 1
    total_steps: int = 1
    training_interval_steps: int = 10
    min_workers_for_training: int = 1
    max_drafter_slots: int = 1
    drafter_enabled: bool = True
    frozen_interval_steps: int = 1  # RL steps from one look at a frozen drafter to the next
    train_during_push: bool = False  # the drafter, on slots that the policy has left
    serial_drafter: bool = False  # train between policy step and commit, not in bubbles
    activation_deadline_s: float = 30.0
    preempt_deadline_s: float = 4.0
    accuracy_enabled: bool = False
    accuracy_every: int = 0  # RL steps; 0: at start and end only
    probe_enabled: bool = False
    probe_every: int = 10  # RL steps; 0: at start and end only
    schedule: Schedule = Schedule.SYNC
    placement: Placement = Placement.COLOCATED
    max_policy_lag: int = 0  # steps that rollouts may be ahead of the policy that serves
    learner_slots: int = 0  # of the policy alone, behind those of the workers
    commit_mode: CommitMode = CommitMode.IN_PLACE
    groups_per_step: int = 1
    samples_per_group: int = 1  # asked for
    dynamic_sampling_rounds: int = 0  # of other tasks for groups of equal rewards; 0: keep them
    profiles: tuple[str, ...] = ()  # that an operator may have the policy rounded to
    profile_stays: bool = False  # the engine cannot leave the one it was started with
    tasks: str = ""  # how many the steps draw from, and a hash of them; empty: agents bring theirs

    @property
    def engine_slots(self) -> int:
        """Slots of workers: w lives on [w * slots_per_worker, (w + 1) * slots_per_worker)."""
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
        """Whether nothing is rolled out from a batch to the commit of what it has taught."""
        return self.colocated and self.schedule is Schedule.SYNC

    @property
    def policy_slots(self) -> range:
        """Slots that the policy trains on."""
        return range(0 if self.colocated else self.engine_slots, self.slots)

    @property
    def most_ranks(self) -> int:
        """Ranks that an operator may ask for: slots of the policy on its trainer's host."""
        elsewhere = self.elsewhere.bit_count() if self.colocated else 0
        return len(self.policy_slots) - elsewhere * self.slots_per_worker
