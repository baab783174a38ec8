"""Holds what the machine decides on: slots, leases, workers, tracks, versions; moves workers and
slots.

Standard library and the nouns of a rollout only, no clock, no randomness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

from coordinator.machine.row import Row
from paceline.trajectory import VersionSet


class MachineError(Exception):
    """An event that is illegal in this state; names the event and the state."""

    def __init__(self, event: str, state: str) -> None:
        self.event = event
        self.state = state
        super().__init__(f"event {event} is illegal in state {state}")


class Holder(StrEnum):
    """Who may compute on a slot."""

    NONE = "none"
    ENGINE = "engine"
    POLICY = "policy"
    DRAFTER = "drafter"


class WorkerState(StrEnum):
    """What an engine worker does, as far as its slots are concerned."""

    IDLE = "idle"
    GENERATING = "generating"
    SUSPENDED = "suspended"  # its requests are held while the policy trains on its slots
    RELEASED = "released"
    TRAINING = "training"
    COMPLETED = "completed"


class Cause(StrEnum):
    """What moves a worker from one state to the next."""

    STEP_BEGAN = "StepBegan"
    SHARE_DONE = "ShareDone"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    LEASE_GRANTED = "LeaseGranted"
    DRAFTER_DONE = "DrafterDone"
    PREEMPTED = "Preempted"


WORKER_TRANSITIONS: dict[tuple[WorkerState, Cause], WorkerState] = {
    (WorkerState.IDLE, Cause.STEP_BEGAN): WorkerState.GENERATING,
    (WorkerState.GENERATING, Cause.SHARE_DONE): WorkerState.RELEASED,
    (WorkerState.GENERATING, Cause.SUSPENDED): WorkerState.SUSPENDED,
    (WorkerState.SUSPENDED, Cause.RESUMED): WorkerState.GENERATING,
    (WorkerState.SUSPENDED, Cause.SHARE_DONE): WorkerState.RELEASED,
    (WorkerState.RELEASED, Cause.LEASE_GRANTED): WorkerState.TRAINING,
    (WorkerState.RELEASED, Cause.STEP_BEGAN): WorkerState.GENERATING,
    (WorkerState.TRAINING, Cause.DRAFTER_DONE): WorkerState.COMPLETED,
    (WorkerState.TRAINING, Cause.PREEMPTED): WorkerState.COMPLETED,
    (WorkerState.COMPLETED, Cause.STEP_BEGAN): WorkerState.GENERATING,
}


class Phase(StrEnum):
    """What the run is in, and what each of its tracks waits for while it is running."""

    NEW = "new"
    RUNNING = "running"
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
    ABORT = "abort"  # they begin again


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
class RunSettings:
    """What the machine decides by; journaled with RunStarted so that a replay needs no config."""

    workers: int = 1
    slots_per_worker: int = 1
    total_steps: int = 1
    training_interval_steps: int = 10
    min_workers_for_training: int = 1
    max_drafter_slots: int = 1
    drafter_enabled: bool = True
    serial_drafter: bool = False  # train between policy step and commit, not in bubbles
    activation_deadline_s: float = 30.0
    preempt_deadline_s: float = 2.0
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
    max_groups_in_flight: int = 0  # 0: no limit but that of max_policy_lag

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
    def policy_slots(self) -> range:
        """Slots that the policy trains on."""
        return range(0 if self.colocated else self.engine_slots, self.slots)


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPU, on CPU a core: one holder at a time, fenced by the epoch of its newest lease."""

    holder: Holder = Holder.NONE
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DrafterLease:
    """Slots that the drafter trainer holds now."""

    epoch: int
    slots: tuple[int, ...]
    preempting: bool = False
    attached: int = 0  # how many of the slots, from the first on, its trainer is known to train on


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

    settings: RunSettings = RunSettings()
    phase: Phase = Phase.NEW
    rollouts: RolloutTrack = RolloutTrack()
    learner: LearnerTrack = LearnerTrack()
    epoch: int = 0  # highest epoch given out
    phase_epoch: int = 0  # epoch of the call that EVALUATE or CLOSING waits for
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
    prepared: int | None = None  # policy prepared at the gateway, served by the next commit
    committing: VersionSet | None = None
    evaluations: tuple[Evaluation, ...] = ()  # still to make before the next step
    drafter_benched: bool = False  # it has failed: no lease before the next share
    seq: int = 0  # highest number of a set that was tried
    lost: frozenset[Service] = frozenset()
    failure: str = ""
    failed_phase: Phase | None = None

    @property
    def step(self) -> int:
        """Step that is trained, or the next one: the number of steps that are finished."""
        return self.learner.step

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


def slot_row(slots: Iterable[Slot]) -> Row[Slot]:
    """Slots, counted by holder."""
    return Row(slots, attrgetter("holder"))


def worker_row(workers: Iterable[WorkerState]) -> Row[WorkerState]:
    """Workers, counted by state."""
    return Row(workers, lambda worker: worker)


def worker_slots(settings: RunSettings, worker: int) -> tuple[int, ...]:
    """Slots of one worker."""
    first = worker * settings.slots_per_worker
    return tuple(range(first, first + settings.slots_per_worker))


def move_workers(state: State, workers: Iterable[int], cause: Cause) -> State:
    """The workers after `cause`. Raises MachineError where WORKER_TRANSITIONS has no such row."""
    moved: dict[int, WorkerState] = {}
    for worker in workers:
        before = state.workers[worker]
        target = WORKER_TRANSITIONS.get((before, cause))
        if target is None:
            raise MachineError(cause.value, f"worker {worker} {before} in {state.describe()}")
        moved[worker] = target
    return _changed(state, workers=state.workers.replaced(moved))


def lease_slots(
    state: State, slots: Iterable[int], holder: Holder, *, under: int | None = None
) -> State:
    """Free slots leased to `holder` under the next epoch, or into its lease of the epoch `under`.

    Raises MachineError when one is held.
    """
    leased = Slot(holder, state.epoch + 1 if under is None else under)
    changed: dict[int, Slot] = {}
    for slot in slots:
        if (now := state.slots[slot].holder) is not Holder.NONE:
            raise MachineError(f"lease of slot {slot} to {holder}", f"held by {now}")
        changed[slot] = leased
    epoch = max(state.epoch, leased.epoch)
    return _changed(state, slots=state.slots.replaced(changed), epoch=epoch)


def free_slots(state: State, slots: Iterable[int], *, fence: bool = False) -> State:
    """The slots held by nobody.

    `fence` gives them a new epoch: their holder has not confirmed that it left.
    """
    chosen = tuple(slots)
    epoch = state.epoch + 1 if fence and chosen else state.epoch
    freed = {
        slot: Slot(Holder.NONE, epoch if fence else state.slots[slot].epoch) for slot in chosen
    }
    return _changed(state, slots=state.slots.replaced(freed), epoch=epoch)


def with_rollouts(state: State, **values: Any) -> State:
    """The state with other values in the rollout track."""
    return _changed(state, rollouts=replace(state.rollouts, **values))


def with_learner(state: State, **values: Any) -> State:
    """The state with other values in the learner track."""
    return _changed(state, learner=replace(state.learner, **values))


def _changed(state: State, **values: object) -> State:
    """As dataclasses.replace does, only faster: every event moves workers and slots."""
    new = object.__new__(State)
    new.__dict__.update(state.__dict__, **values)
    return new


def held_by(state: State, holder: Holder) -> tuple[int, ...]:
    """Slots of one holder."""
    return tuple(state.slots.where(holder))
