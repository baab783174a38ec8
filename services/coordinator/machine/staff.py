"""Lets workers join and leave a run that goes on, as an operator wants it.

A place keeps its slots when its worker is gone, and a colocated policy goes on training there. A
worker that joins is idle until the next tasks are called. One that is to leave gets none from then
on: the calls that have given it a share are made again without it, and the gateway has its requests
end or go on elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.commands import AddWorkers, DrainWorkers
from paceline.services.coordinator.machine.decision import Decision, Objection, refused
from paceline.services.coordinator.machine.drafter import preempt
from paceline.services.coordinator.machine.losses import interrupted
from paceline.services.coordinator.machine.moves import (
    free_slots,
    lease_slots,
    move_workers,
    worker_slots,
)
from paceline.services.coordinator.machine.rollout import bits
from paceline.services.coordinator.machine.slots import Cause, Holder, WorkerState
from paceline.services.coordinator.machine.state import Phase, Service, State


def workers_requested(state: State, event: events.WorkersRequested) -> Decision:
    """The gateway is asked for a worker in each of these places as soon as no policy trains there;
    refused where there is one.
    """
    if against_joining(state, event) is not None:
        return refused(state, event, len(event.workers), len(vacant_places(state)))
    joining = replace(state.joining, workers=state.joining.workers | _mask(event.workers))
    return Decision(replace(state, joining=joining))


def drain_requested(state: State, event: events.DrainRequested) -> Decision:
    """The workers get no tasks any more; refused where none would be left."""
    if against_leaving(state, event) is not None:
        return refused(state, event, len(event.workers), len(staying(state)))
    wanted = state.leaving.workers | _mask(event.workers)
    leaving = replace(state.leaving, workers=wanted, drain_s=event.drain_s)
    return Decision(replace(state, leaving=leaving))


def against_joining(state: State, event: events.WorkersRequested) -> Objection | None:
    """What speaks against new workers."""
    if not state.settings.elastic:
        return _KEEPS_ITS_WORKERS
    begun, steps = state.rollouts.begun, state.settings.total_steps
    if begun >= steps:
        seen = f"{begun} of {steps} steps have begun"
        return Objection("no step is left for a new worker", seen, "a run with steps to begin")
    places = (*vacant_places(state), *bits(state.joining.workers))
    if taken := [one for one in event.workers if one not in places]:
        return Objection("the place has a worker", f"worker {taken[0]}", _named(places))
    return None


def against_leaving(state: State, event: events.DrainRequested) -> Objection | None:
    """What speaks against a drain."""
    if not state.settings.elastic:
        return _KEEPS_ITS_WORKERS
    stays, gone = staying(state), set(bits(state.leaving.workers))
    if unknown := [one for one in event.workers if one not in (*stays, *gone)]:
        return Objection("there is no such worker", f"worker {unknown[0]}", _named(stays))
    if not set(stays) - set(event.workers):
        return Objection(
            "a run keeps an engine worker",
            f"drain {_named(event.workers)}",
            f"all but one of {_named(stays)}",
        )
    return None


_KEEPS_ITS_WORKERS = Objection(
    "this gateway keeps the workers that it has", "gateway.replicas above 1", "gateway.replicas=1"
)


def _named(workers: Iterable[int]) -> str:
    return ", ".join(map(str, workers)) or "none"


def join(state: State) -> Decision | None:
    """The gateway starts workers that an operator has asked for, where no policy trains on their
    slots.
    """
    joining = state.joining
    if not joining.workers & ~joining.called or Service.GATEWAY in state.lost:
        return None
    workers = tuple(bits(joining.workers))
    holders = {state.slots[i].holder for one in workers for i in worker_slots(state.settings, one)}
    if Holder.POLICY in holders:
        return None
    epoch = state.epoch + 1
    called = replace(joining, called=joining.workers, epoch=epoch)
    command = AddWorkers(state.step, epoch, workers)
    return Decision(replace(state, epoch=epoch, joining=called), (command,))


def leave(state: State) -> Decision | None:
    """The gateway has workers leave that an operator wants gone, when the drafter has left their
    slots; tasks that they have a share of are called again without them.
    """
    leaving = state.leaving
    due = leaving.workers & ~leaving.called
    if not due or Service.GATEWAY in state.lost:
        return None
    if any(state.workers[one] is WorkerState.TRAINING for one in bits(due)):
        return preempt(state)
    shares = any(draw.called and draw.owed & due for draw in state.rollouts.running)
    there = [one for one in bits(due) if state.workers[one] is not WorkerState.LEAVING]
    state = move_workers(interrupted(state) if shares else state, there, Cause.DRAIN_REQUESTED)
    epoch = state.epoch + 1
    called = replace(leaving, called=leaving.workers, epoch=epoch)
    command = DrainWorkers(state.step, epoch, tuple(bits(leaving.workers)), leaving.drain_s)
    return Decision(replace(state, epoch=epoch, leaving=called), (command,))


def workers_joined(state: State, event: events.WorkersJoined) -> Decision:
    """They get a share of the next tasks; in a pause they answer callers at once."""
    state = move_workers(_joins_no_more(state, event.workers), event.workers, Cause.WORKERS_JOINED)
    if state.phase is Phase.PAUSED:
        slots = [i for one in event.workers for i in worker_slots(state.settings, one)]
        state = lease_slots(state, slots, Holder.ENGINE)
    return Decision(state)


def join_refused(state: State, event: events.JoinRefused) -> Decision:
    """Their places stay vacant."""
    return Decision(_joins_no_more(state, event.workers))


def workers_left(state: State, event: events.WorkersLeft) -> Decision:
    """Their places are vacant; of their slots none is the engine's any more."""
    left = _mask(event.workers)
    leaving = state.leaving
    leaving = replace(leaving, workers=leaving.workers & ~left, called=leaving.called & ~left)
    state = move_workers(replace(state, leaving=leaving), event.workers, Cause.WORKERS_LEFT)
    held = [i for one in event.workers for i in worker_slots(state.settings, one)]
    return Decision(free_slots(state, [i for i in held if state.slots[i].holder is Holder.ENGINE]))


def vacant_places(state: State) -> tuple[int, ...]:
    """Places without a worker that none is about to take."""
    absent = state.workers.where(WorkerState.ABSENT)
    return tuple(one for one in absent if not state.joining.workers >> one & 1)


def there(state: State) -> tuple[int, ...]:
    """Places that have a worker."""
    absent = set(state.workers.where(WorkerState.ABSENT))
    return tuple(one for one in range(len(state.workers)) if one not in absent)


def staying(state: State) -> tuple[int, ...]:
    """Workers that are there and are not to leave."""
    return tuple(
        one
        for one, now in enumerate(state.workers)
        if now not in (WorkerState.ABSENT, WorkerState.LEAVING)
        and not state.leaving.workers >> one & 1
    )


def _joins_no_more(state: State, workers: Iterable[int]) -> State:
    came, joining = _mask(workers), state.joining
    joining = replace(joining, workers=joining.workers & ~came, called=joining.called & ~came)
    return replace(state, joining=joining)


def _mask(workers: Iterable[int]) -> int:
    return sum(1 << one for one in set(workers))
