"""Holds what the machine decides on: slots, leases, workers, the phase, versions; moves workers and
slots.

Standard library and the nouns of a rollout only, no clock, no randomness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

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
    RELEASED = "released"
    TRAINING = "training"
    COMPLETED = "completed"


class Cause(StrEnum):
    """What moves a worker from one state to the next."""

    STEP_BEGAN = "StepBegan"
    SHARE_DONE = "ShareDone"
    LEASE_GRANTED = "LeaseGranted"
    DRAFTER_DONE = "DrafterDone"
    PREEMPTED = "Preempted"


WORKER_TRANSITIONS: dict[tuple[WorkerState, Cause], WorkerState] = {
    (WorkerState.IDLE, Cause.STEP_BEGAN): WorkerState.GENERATING,
    (WorkerState.GENERATING, Cause.SHARE_DONE): WorkerState.RELEASED,
    (WorkerState.RELEASED, Cause.LEASE_GRANTED): WorkerState.TRAINING,
    (WorkerState.RELEASED, Cause.STEP_BEGAN): WorkerState.GENERATING,
    (WorkerState.TRAINING, Cause.DRAFTER_DONE): WorkerState.COMPLETED,
    (WorkerState.TRAINING, Cause.PREEMPTED): WorkerState.COMPLETED,
    (WorkerState.COMPLETED, Cause.STEP_BEGAN): WorkerState.GENERATING,
}


class Phase(StrEnum):
    """What the run waits for."""

    NEW = "new"
    READY = "ready"
    EVALUATE = "evaluate"
    ROLLOUT = "rollout"
    PREEMPT = "preempt"
    POLICY = "policy"
    DRAFTER = "drafter"  # serial schedule only: the set waits for the drafter
    COMMIT = "commit"
    CLOSING = "closing"
    FINISHED = "finished"
    FAILED = "failed"


IN_STEP = (Phase.ROLLOUT, Phase.PREEMPT, Phase.POLICY, Phase.DRAFTER, Phase.COMMIT)
"""Phases between StepBegan and the commit that ends the step."""


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

    @property
    def slots(self) -> int:
        """Number of slots; worker w lives on [w * slots_per_worker, (w + 1) * slots_per_worker)."""
        return self.workers * self.slots_per_worker


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


@dataclass(frozen=True)
class State:
    """Everything a decision depends on."""

    settings: RunSettings = RunSettings()
    phase: Phase = Phase.NEW
    step: int = 0  # step running, or the next one in phases READY and EVALUATE
    epoch: int = 0  # highest epoch given out
    phase_epoch: int = 0  # epoch of the call that the phase waits for
    slots: Row[Slot] = field(default_factory=lambda: slot_row(()))
    workers: Row[WorkerState] = field(default_factory=lambda: worker_row(()))
    lease: DrafterLease | None = None
    lease_epoch: int = 0  # epoch of the newest drafter lease, live or ended
    versions: VersionSet = field(default_factory=VersionSet)
    previous_drafter: int | None = None  # served before the serving drafter; None after a rollback
    promoted: int | None = None  # drafter prepared at the gateway, served by the next commit
    candidate: tuple[int, int] = (0, 0)  # promoted last: its lease's epoch, its version
    rollback: bool = False  # serve the previous drafter again before the next policy
    prepared: int | None = None  # policy prepared at the gateway, served by the next commit
    committing: VersionSet | None = None
    evaluations: tuple[Evaluation, ...] = ()  # still to make before the next step
    rollout_restart: bool = False  # run the tasks again as soon as the drafter is off its slots
    seq: int = 0  # highest number of a set that was tried
    attempts: int = 0  # times the phase's call began again because of a failure of its service
    lost: frozenset[Service] = frozenset()
    failure: str = ""
    failed_phase: Phase | None = None

    def describe(self) -> str:
        """One line for errors."""
        counts = {each: self.workers.counted(each) for each in WorkerState}
        workers = ", ".join(f"{count} {each}" for each, count in counts.items() if count)
        return (
            f"{self.phase} (step {self.step}, epoch {self.phase_epoch}, workers "
            f"{workers or 'none'})"
        )


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


def lease_slots(state: State, slots: Iterable[int], holder: Holder) -> State:
    """Free slots leased to `holder` under the next epoch. Raises MachineError when one is held."""
    leased = Slot(holder, state.epoch + 1)
    changed: dict[int, Slot] = {}
    for slot in slots:
        if (now := state.slots[slot].holder) is not Holder.NONE:
            raise MachineError(f"lease of slot {slot} to {holder}", f"held by {now}")
        changed[slot] = leased
    return _changed(state, slots=state.slots.replaced(changed), epoch=leased.epoch)


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


def _changed(state: State, **values: object) -> State:
    """As dataclasses.replace does, only faster: every event moves workers and slots."""
    new = object.__new__(State)
    new.__dict__.update(state.__dict__, **values)
    return new


def held_by(state: State, holder: Holder) -> tuple[int, ...]:
    """Slots of one holder."""
    return tuple(state.slots.where(holder))
