"""Holds what the machine decides on: phases, tracks, leases, versions.

Standard library and the nouns of a rollout only, no clock, no randomness.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline.services.coordinator.machine.row import Row
from paceline.services.coordinator.machine.settings import CommitMode, RunSettings
from paceline.services.coordinator.machine.slots import (
    DrafterLease,
    Slot,
    WorkerState,
    slot_row,
    worker_row,
)
from paceline.trajectory import SWAPPED_PATH, VersionSet


class MachineError(Exception):
    """An event that is illegal in this state; names the event and the state."""

    def __init__(self, event: str, state: str) -> None:
        self.event = event
        self.state = state
        super().__init__(f"event {event} is illegal in state {state}")


class Phase(StrEnum):
    """What the run is in, and what each of its tracks waits for while it is running."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"  # at rest: the engine has all workers' slots
    EVALUATE = "evaluate"
    CLOSING = "closing"
    FINISHED = "finished"
    FAILED = "failed"
    # of the rollout track
    READY = "ready"  # nothing is rolled out
    ROLLOUT = "rollout"
    SUSPENDED = "suspended"  # the policy trains on the slots of rollouts that go on afterwards
    # of the learner track
    IDLE = "idle"  # waits for a batch
    PREEMPT = "preempt"  # waits for its slots
    POLICY = "policy"
    DRAFTER = "drafter"  # serial schedule only: the set waits for the drafter
    COMMIT = "commit"


RESTING = (Phase.READY, Phase.IDLE)  # of tracks that do nothing


class Service(StrEnum):
    """Peers that are commanded."""

    GATEWAY = "gateway"
    POLICY_TRAINER = "policy_trainer"
    DRAFTER_TRAINER = "drafter_trainer"


OPTIONAL = frozenset({Service.DRAFTER_TRAINER})
"""Peers whose absence ends nothing: the run goes on without them, however long they are away."""


class Evaluation(StrEnum):
    """Kinds of evaluation; the values are the keys of StepRecord.evaluations."""

    ACCURACY = "accuracy"
    PROBE = "accept_length_probe"


@dataclass(frozen=True, slots=True)
class DrafterPin:
    """An operator's choice: this drafter serves from the next commit on, whatever is promoted."""

    version: int
    lasting: bool = True  # until it is taken away; else for one policy, as after a rollback


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The tasks of a step, from StepBegan until all their groups are trained."""

    step: int
    version: int  # steps committed when it began: none of its tokens is of an older policy
    epoch: int = 0  # of its newest call
    called: bool = False  # the call goes on
    finished: bool = False
    owed: int = 0  # workers that have not done their share, a bit each
    closed: int = 0  # groups that get no more samples, a bit each
    taken: int = 0  # groups that a batch has, a bit each
    round: int = 0  # of dynamic sampling: 0 draws the step's tasks, each later one stands in
    places: int = 0  # groups that the round draws, a bit each


@dataclass(frozen=True, slots=True)
class Portion:
    """What a batch takes of a step's tasks."""

    step: int
    groups: int | None = None  # a bit each; None: all


@dataclass(frozen=True, slots=True)
class RolloutTrack:
    """The track that generates."""

    phase: Phase = Phase.READY
    step: int = 0  # whose tasks are drawn next
    drawing: bool = False  # they are being drawn
    epoch: int = 0  # of its newest call
    attempts: int = 0  # times its calls began again because of a failure of their service
    draws: tuple[DrawnStep, ...] = ()  # by step
    damaged: bool = False  # its calls wait for the next set: nobody has the one that serves

    @property
    def begun(self) -> int:
        """Number of steps whose tasks are drawn, or about to be."""
        return self.step + self.drawing

    @property
    def running(self) -> tuple[DrawnStep, ...]:
        """Draws whose samples have not all ended."""
        return tuple(draw for draw in self.draws if not draw.finished)


@dataclass(frozen=True, slots=True)
class LearnerTrack:
    """The track that trains."""

    phase: Phase = Phase.IDLE
    step: int = 0  # that it trains, or the next one
    epoch: int = 0  # of its newest call
    attempts: int = 0  # as of RolloutTrack
    batch: tuple[Portion, ...] = ()  # that it trains


@dataclass(frozen=True)
class State:
    """Everything a decision depends on."""

    settings: RunSettings = field(default_factory=RunSettings)
    phase: Phase = Phase.NEW
    rollouts: RolloutTrack = RolloutTrack()
    learner: LearnerTrack = LearnerTrack()
    epoch: int = 0  # highest epoch given out
    phase_epoch: int = 0  # epoch of the call that EVALUATE, PAUSED or CLOSING has made
    slots: Row[Slot] = field(default_factory=lambda: slot_row(()))
    workers: Row[WorkerState] = field(default_factory=lambda: worker_row(()))
    lease: DrafterLease | None = None
    lease_epoch: int = 0  # epoch of the newest drafter lease, live or ended
    versions: VersionSet = field(default_factory=VersionSet)
    previous_drafter: int | None = None  # served before the serving drafter; None after a rollback
    promoted: int | None = None  # drafter prepared at the gateway, served by the next commit
    candidate: tuple[int, int] = (0, 0)  # promoted last: its lease's epoch, its version
    rollback: bool = False  # serve the previous drafter again before the next policy
    pin: DrafterPin | None = None  # promotions wait meanwhile
    profile: str | None = None  # chosen by an operator: the next policy is rounded to it
    prepared: int | None = None  # policy prepared at the gateway, served by the next commit
    committing: VersionSet | None = None
    evaluations: tuple[Evaluation, ...] = ()  # still to make before the next step
    paused: bool = False  # an operator wants no step to begin
    drafter_benched: bool = False  # it has failed: no lease before the next share
    drafter_rests_until: int = 0  # a step; its training was frozen
    seq: int = 0  # highest number of a set that was tried
    lost: frozenset[Service] = frozenset()
    quarantined: tuple[str, ...] = ()  # paths that the audit found inexact, as they were found
    failure: str = ""
    failed_phase: Phase | None = None

    @property
    def step(self) -> int:
        """Step that is trained, or the next one: the number of steps that are finished."""
        return self.learner.step

    @property
    def commit_mode(self) -> CommitMode:
        """How running requests go over to a new policy: without keys and values of the old one
        where the audit found these inexact.
        """
        mode = self.settings.commit_mode
        stale = mode is CommitMode.IN_PLACE and SWAPPED_PATH in self.quarantined
        return CommitMode.RETRACT if stale else mode

    def worker_on(self, slot: int) -> WorkerState | None:
        """State of the worker that lives on a slot; None on a slot of the learner's own."""
        engine = slot < self.settings.engine_slots
        return self.workers[slot // self.settings.slots_per_worker] if engine else None

    @property
    def phases(self) -> frozenset[Phase]:
        """Of the run, and while it is running of its tracks."""
        tracks = (self.rollouts.phase, self.learner.phase) if self.phase is Phase.RUNNING else ()
        return frozenset((self.phase, *tracks))

    @property
    def doing(self) -> str:
        """The phases of the tracks that do something, for readers: "rollout", "rollout+policy"."""
        if self.phase is not Phase.RUNNING:
            return self.phase
        tracks = (self.rollouts.phase, self.learner.phase)
        return "+".join(one for one in tracks if one not in RESTING) or Phase.READY

    def describe(self) -> str:
        """One line for errors."""
        counts = {each: self.workers.counted(each) for each in WorkerState}
        workers = ", ".join(f"{count} {each}" for each, count in counts.items() if count)
        return f"{self.doing} (step {self.step}, epoch {self.epoch}, workers {workers or 'none'})"


def with_rollouts(state: State, **values: Any) -> State:
    """The state with other values in the rollout track."""
    return with_values(state, rollouts=replace(state.rollouts, **values))


def with_learner(state: State, **values: Any) -> State:
    """The state with other values in the learner track."""
    return with_values(state, learner=replace(state.learner, **values))


def with_values(state: State, **values: object) -> State:
    """As dataclasses.replace does, only faster: every event moves workers and slots."""
    new = object.__new__(State)
    new.__dict__.update(state.__dict__, **values)
    return new
