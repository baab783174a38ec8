"""The machine's state: phases, tracks, leases, versions; and moves of workers and slots.

It uses the standard library and the nouns of a rollout only, no clock and no randomness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline.services.coordinator.machine.settings import CommitMode, Frozen, RunSettings
from paceline.services.coordinator.machine.slots import (
    WORKER_TRANSITIONS,
    Cause,
    DrafterLease,
    Holder,
    Row,
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
    """Phase of the run; while it is running, each track has a phase of its own."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"  # at rest: the engine has all workers' slots
    EVALUATE = "evaluate"
    CLOSING = "closing"
    FINISHED = "finished"
    FAILED = "failed"
    # Phases of the rollout track.
    READY = "ready"  # nothing is rolled out
    ROLLOUT = "rollout"
    SUSPENDED = "suspended"  # the policy trains on the slots of suspended rollouts
    # Phases of the learner track.
    IDLE = "idle"  # waits for a batch
    PREEMPT = "preempt"  # waits for the policy's slots
    POLICY = "policy"
    DRAFTER = "drafter"  # serial schedule only: the commit waits for the drafter
    COMMIT = "commit"


RESTING = (Phase.READY, Phase.IDLE)  # phases of an idle track


class Service(StrEnum):
    """Services that receive commands."""

    GATEWAY = "gateway"
    POLICY_TRAINER = "policy_trainer"
    DRAFTER_TRAINER = "drafter_trainer"


OPTIONAL = frozenset({Service.DRAFTER_TRAINER})
"""Optional services: the run continues without them for any time."""


class Evaluation(StrEnum):
    """Kinds of evaluation; the values are the keys of StepRecord.evaluations."""

    ACCURACY = "accuracy"
    PROBE = "accept_length_probe"


class Portion(Frozen):
    """A batch's part of a step's tasks."""

    step: int
    groups: int | None = None  # a bit each; None: all


class DrawnStep(Frozen):
    """The tasks of a step, from StepBegan until all their groups are trained."""

    step: int
    version: int  # committed steps at its start: no token has an older policy
    epoch: int = 0  # of the newest call
    called: bool = False  # the call is running
    finished: bool = False
    owed: int = 0  # workers with an unfinished share, a bit each
    closed: int = 0  # closed groups, a bit each
    taken: int = 0  # groups in a batch, a bit each
    round: int = 0  # of dynamic sampling: 0 draws the step's tasks, later rounds replace groups
    places: int = 0  # groups drawn by the round, a bit each

    def take(self, portion: Portion | None) -> DrawnStep:
        """The draw after a batch has taken a portion of it, if any."""
        if portion is None:
            return self
        groups = self.closed if portion.groups is None else portion.groups
        return replace(self, taken=self.taken | groups)


class RolloutTrack(Frozen):
    """The track that generates."""

    phase: Phase = Phase.READY
    step: int = 0  # step with the next tasks to draw
    drawing: bool = False  # the tasks are being drawn
    epoch: int = 0  # of the newest call
    attempts: int = 0  # restarts of its calls after a failure of their service
    draws: tuple[DrawnStep, ...] = ()  # by step
    damaged: bool = False  # calls wait for the next set: the serving set is lost

    @property
    def begun(self) -> int:
        """Number of steps with tasks drawn or being drawn."""
        return self.step + self.drawing

    @property
    def running(self) -> tuple[DrawnStep, ...]:
        """Draws with running samples."""
        return tuple(draw for draw in self.draws if not draw.finished)


class LearnerTrack(Frozen):
    """The track that trains."""

    phase: Phase = Phase.IDLE
    step: int = 0  # step being trained, or the next one
    epoch: int = 0  # of the newest call
    attempts: int = 0  # see RolloutTrack
    batch: tuple[Portion, ...] = ()  # being trained


@dataclass(frozen=True)
class State:
    """All inputs of a decision."""

    settings: RunSettings = field(default_factory=RunSettings)
    phase: Phase = Phase.NEW
    rollouts: RolloutTrack = field(default_factory=RolloutTrack)
    learner: LearnerTrack = field(default_factory=LearnerTrack)
    epoch: int = 0  # highest epoch used
    phase_epoch: int = 0  # epoch of the call of EVALUATE, PAUSED or CLOSING
    slots: Row[Slot] = field(default_factory=lambda: slot_row(()))
    workers: Row[WorkerState] = field(default_factory=lambda: worker_row(()))
    lease: DrafterLease | None = None
    lease_epoch: int = 0  # epoch of the newest drafter lease, running or ended
    versions: VersionSet = field(default_factory=VersionSet)
    previous_drafter: int | None = None  # served before the serving drafter; None after a rollback
    promoted: int | None = None  # drafter prepared at the gateway, served by the next commit
    candidate: tuple[int, int] = (0, 0)  # last promotion: its lease's epoch, its version
    rollback: bool = False  # serve the previous drafter again before the next policy
    prepared: int | None = None  # policy prepared at the gateway, served by the next commit
    committing: VersionSet | None = None
    evaluations: tuple[Evaluation, ...] = ()  # still to make before the next step
    paused: bool = False  # an operator wants no step to begin
    drafter_benched: bool = False  # the drafter has failed: no lease before the next share
    drafter_rests_until: int = 0  # a step; its training was frozen
    seq: int = 0  # highest number of a set that was tried
    lost: frozenset[Service] = frozenset()
    quarantined: tuple[str, ...] = ()  # paths that the audit found inexact, in order
    failure: str = ""
    failed_phase: Phase | None = None

    @property
    def step(self) -> int:
        """Step being trained, or the next one: the number of finished steps."""
        return self.learner.step

    @property
    def all_begun(self) -> bool:
        """Whether tasks are drawn or being drawn for every step."""
        return self.rollouts.begun >= self.settings.total_steps

    @property
    def commit_mode(self) -> CommitMode:
        """Treatment of running requests under a new policy: without the old keys and values if the
        audit found these inexact.
        """
        mode = self.settings.commit_mode
        stale = mode is CommitMode.IN_PLACE and SWAPPED_PATH in self.quarantined
        return CommitMode.RETRACT if stale else mode

    def worker_on(self, slot: int) -> WorkerState | None:
        """State of the worker on a slot; None on the learner's own slots."""
        engine = slot < self.settings.engine_slots
        return self.workers[slot // self.settings.slots_per_worker] if engine else None

    @property
    def phases(self) -> frozenset[Phase]:
        """Phase of the run, and of its tracks while it is running."""
        tracks = (self.rollouts.phase, self.learner.phase) if self.phase is Phase.RUNNING else ()
        return frozenset((self.phase, *tracks))

    @property
    def doing(self) -> str:
        """The phases of active tracks, for readers: "rollout", "rollout+policy"."""
        if self.phase is not Phase.RUNNING:
            return self.phase
        tracks = (self.rollouts.phase, self.learner.phase)
        return "+".join(one for one in tracks if one not in RESTING) or Phase.READY

    def describe(self) -> str:
        """One line for errors."""
        counts = {each: self.workers.counted(each) for each in WorkerState}
        workers = ", ".join(f"{count} {each}" for each, count in counts.items() if count)
        return f"{self.doing} (step {self.step}, epoch {self.epoch}, workers {workers or 'none'})"

    def with_values(self, **values: object) -> State:
        """As dataclasses.replace, but faster, since every event moves workers and slots."""
        new = object.__new__(State)
        new.__dict__.update(self.__dict__, **values)
        return new

    def with_rollouts(self, **values: Any) -> State:
        """The state with other values in the rollout track."""
        return self.with_values(rollouts=replace(self.rollouts, **values))

    def with_learner(self, **values: Any) -> State:
        """The state with other values in the learner track."""
        return self.with_values(learner=replace(self.learner, **values))

    def move_workers(self, workers: Iterable[int], cause: Cause) -> State:
        """The workers after `cause`. Raises MachineError if WORKER_TRANSITIONS has no such row."""
        moved: dict[int, WorkerState] = {}
        for worker in workers:
            before = self.workers[worker]
            target = WORKER_TRANSITIONS.get((before, cause))
            if target is None:
                raise MachineError(cause.value, f"worker {worker} {before} in {self.describe()}")
            moved[worker] = target
        return self.with_values(workers=self.workers.replaced(moved))

    def lease_slots(
        self, slots: Iterable[int], holder: Holder, *, under: int | None = None
    ) -> State:
        """Leases free slots to `holder` under the next epoch, or into its lease of epoch `under`.

        Raises MachineError when a slot is held.
        """
        leased = Slot(holder, self.epoch + 1 if under is None else under)
        changed: dict[int, Slot] = {}
        for slot in slots:
            if (now := self.slots[slot].holder) is not Holder.NONE:
                raise MachineError(f"lease of slot {slot} to {holder}", f"held by {now}")
            changed[slot] = leased
        epoch = max(self.epoch, leased.epoch)
        return self.with_values(slots=self.slots.replaced(changed), epoch=epoch)

    def free_slots(self, slots: Iterable[int], *, fence: bool = False) -> State:
        """Frees slots.

        `fence` gives them a new epoch, since their holder has not confirmed that it left.
        """
        chosen = tuple(slots)
        epoch = self.epoch + 1 if fence and chosen else self.epoch
        freed = {
            slot: Slot(Holder.NONE, epoch if fence else self.slots[slot].epoch) for slot in chosen
        }
        return self.with_values(slots=self.slots.replaced(freed), epoch=epoch)

    def held_by(self, holder: Holder) -> tuple[int, ...]:
        """Slots of one holder."""
        return tuple(self.slots.where(holder))
