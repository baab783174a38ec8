"""Holders of slots, states of engine workers, and transitions between states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from paceline.services.coordinator.machine.row import Row


class Holder(StrEnum):
    """Holder of a slot."""

    NONE = "none"
    ENGINE = "engine"
    POLICY = "policy"
    DRAFTER = "drafter"


class WorkerState(StrEnum):
    """State of an engine worker with respect to its slots."""

    IDLE = "idle"
    GENERATING = "generating"
    SUSPENDED = "suspended"  # its requests are held while the policy trains on its slots
    RELEASED = "released"
    TRAINING = "training"
    COMPLETED = "completed"


class Cause(StrEnum):
    """Cause of a worker's transition."""

    STEP_BEGAN = "StepBegan"
    SHARE_DONE = "ShareDone"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    LEASE_GRANTED = "LeaseGranted"
    DRAFTER_DONE = "DrafterDone"
    PREEMPTED = "Preempted"
    POLICY_STEPPED = "PolicyStepped"
    COMMITTED = "Committed"


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
    (WorkerState.COMPLETED, Cause.POLICY_STEPPED): WorkerState.RELEASED,
    (WorkerState.COMPLETED, Cause.COMMITTED): WorkerState.RELEASED,
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPU, or a core on a CPU: one holder at a time, fenced by the epoch of its newest lease."""

    holder: Holder = Holder.NONE
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DrafterLease:
    """Slots that the drafter trainer holds at present."""

    epoch: int
    slots: tuple[int, ...]
    preempting: bool = False
    attached: int = 0  # number of slots, from the first, confirmed by its trainer


def slot_row(slots: Iterable[Slot]) -> Row[Slot]:
    """Slots, counted by holder."""
    return Row(slots, attrgetter("holder"))


def worker_row(workers: Iterable[WorkerState]) -> Row[WorkerState]:
    """Workers, counted by state."""
    return Row(workers, lambda worker: worker)
