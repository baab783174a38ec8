"""Moves workers between states and slots between holders."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.slots import (
    WORKER_TRANSITIONS,
    Cause,
    Holder,
    Slot,
    WorkerState,
)
from paceline.services.coordinator.machine.state import MachineError, State, with_values


def worker_slots(settings: RunSettings, worker: int) -> tuple[int, ...]:
    """Slots of one worker."""
    first = worker * settings.slots_per_worker
    return tuple(range(first, first + settings.slots_per_worker))


def move_workers(state: State, workers: Iterable[int], cause: Cause) -> State:
    """The workers after `cause`. Raises MachineError if WORKER_TRANSITIONS has no such row."""
    moved: dict[int, WorkerState] = {}
    for worker in workers:
        before = state.workers[worker]
        target = WORKER_TRANSITIONS.get((before, cause))
        if target is None:
            raise MachineError(cause.value, f"worker {worker} {before} in {state.describe()}")
        moved[worker] = target
    return with_values(state, workers=state.workers.replaced(moved))


def lease_slots(
    state: State, slots: Iterable[int], holder: Holder, *, under: int | None = None
) -> State:
    """Leases free slots to `holder` under the next epoch, or into its lease of epoch `under`.

    Raises MachineError when a slot is held.
    """
    leased = Slot(holder, state.epoch + 1 if under is None else under)
    changed: dict[int, Slot] = {}
    for slot in slots:
        if (now := state.slots[slot].holder) is not Holder.NONE:
            raise MachineError(f"lease of slot {slot} to {holder}", f"held by {now}")
        changed[slot] = leased
    epoch = max(state.epoch, leased.epoch)
    return with_values(state, slots=state.slots.replaced(changed), epoch=epoch)


def free_slots(state: State, slots: Iterable[int], *, fence: bool = False) -> State:
    """Frees slots.

    `fence` gives them a new epoch, since their holder has not confirmed that it left.
    """
    chosen = tuple(slots)
    epoch = state.epoch + 1 if fence and chosen else state.epoch
    freed = {
        slot: Slot(Holder.NONE, epoch if fence else state.slots[slot].epoch) for slot in chosen
    }
    return with_values(state, slots=state.slots.replaced(freed), epoch=epoch)


def held_by(state: State, holder: Holder) -> tuple[int, ...]:
    """Slots of one holder."""
    return tuple(state.slots.where(holder))
