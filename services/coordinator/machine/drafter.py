"""Leases released slots to the drafter trainer and takes them back; notes what its gate decides."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from coordinator.machine import events
from coordinator.machine.commands import AbortDrafter, ActivateDrafter, PreemptDrafter
from coordinator.machine.decision import Decision, refused
from coordinator.machine.state import (
    OPTIONAL,
    Cause,
    DrafterLease,
    Holder,
    Phase,
    Service,
    State,
    WorkerState,
    free_slots,
    lease_slots,
    move_workers,
    worker_slots,
)


def lease_released(state: State) -> Decision:
    """Leases released slots to the drafter while other workers still generate."""
    settings = state.settings
    wanted = (
        _due(state)
        and not settings.serial_drafter
        and state.lost <= OPTIONAL  # else the tasks run again, on all workers
        and state.workers.counted(WorkerState.GENERATING)
        and state.workers.counted(WorkerState.RELEASED) >= settings.min_workers_for_training
    )
    return _lease(state) if wanted else Decision(state)


def train_alone(state: State) -> Decision:
    """The serial schedule: the drafter trains while everybody waits, and the set follows.

    Once a step: after a failed commit its workers are COMPLETED, and the set is committed as it is.
    """
    if state.lease is not None:  # a former coordinator's, whose call is gone
        return preempt(state)
    released = state.workers.counted(WorkerState.RELEASED)
    if state.settings.serial_drafter and _due(state) and released:
        return _lease(state)
    return Decision(state, enters=Phase.COMMIT)


def take_back(state: State) -> Decision:
    """Asks for the drafter's slots; the policy trains when it has left them."""
    return Decision(state, enters=Phase.POLICY) if state.lease is None else preempt(state)


def preempt(state: State) -> Decision:
    """Asks for the drafter's slots, once per lease; nothing to do without a lease."""
    lease = state.lease
    if lease is None or lease.preempting:
        return Decision(state)
    state = replace(state, lease=replace(lease, preempting=True))
    deadline_s = state.settings.preempt_deadline_s
    return Decision(state, (PreemptDrafter(state.step, lease.epoch, deadline_s),))


def noted(
    state: State, event: events.DrafterActivated | events.GateDecided | events.WorkersReleased
) -> Decision:
    """A record, nothing else."""
    return Decision(state)


def promoted(state: State, event: events.GatePromoted) -> Decision:
    """Keeps the candidate for the next commit; an older one that waited for it is aborted.

    A prepared candidate is no right to a slot: it counts even when Preempted overtook it.
    """
    older = state.promoted
    version = event.drafter_version
    state = replace(state, promoted=version, candidate=(event.epoch, version))
    if older is None or older == version:
        return Decision(state)
    if state.committing is not None and state.committing.drafter == older:
        return Decision(state)  # about to serve
    return Decision(state, (AbortDrafter(state.step, state.epoch, older),))


def preempted(state: State, event: events.Preempted) -> Decision:
    """Ends the lease."""
    return end_lease(state, Cause.PREEMPTED)


def detached(state: State, event: events.Detached) -> Decision:
    """Ends the lease, whether the drafter was done or preempted."""
    return end_lease(state, Cause.PREEMPTED if event.reason == "preempted" else Cause.DRAFTER_DONE)


def end_lease(state: State, cause: Cause, *, fence: bool = False) -> Decision:
    """Frees the drafter's slots and goes on with what has waited for them.

    `fence`: the drafter trainer has not confirmed that it left.
    """
    assert state.lease is not None
    slots = state.lease.slots
    workers = sorted({slot // state.settings.slots_per_worker for slot in slots})
    state = free_slots(move_workers(state, workers, cause), slots, fence=fence)
    state = replace(state, lease=None)
    if state.phase is Phase.PREEMPT:
        return Decision(state, enters=Phase.POLICY)
    if state.phase is Phase.DRAFTER:
        return Decision(state, enters=Phase.COMMIT)
    if state.rollout_restart:
        return Decision(state, enters=Phase.ROLLOUT)
    # One that is done may have slots released meanwhile; one that failed waits for the next share.
    return Decision(state) if fence else lease_released(state)


def acceptance_fell(state: State, event: events.AcceptanceFell) -> Decision:
    """Serves the drafter before this one again with the next commit."""
    if event.drafter_version != state.versions.drafter or state.previous_drafter is None:
        return refused(state, event, event.drafter_version, state.versions.drafter)
    return Decision(replace(state, rollback=True))


def _due(state: State) -> bool:
    """Whether this is one of the drafter's steps, and its trainer is there and holds nothing."""
    settings = state.settings
    return (
        settings.drafter_enabled
        and state.step % settings.training_interval_steps == 0
        and state.lease is None
        and Service.DRAFTER_TRAINER not in state.lost
    )


def _lease(state: State) -> Decision:
    settings = state.settings
    count = max(1, settings.max_drafter_slots // settings.slots_per_worker)
    workers = list(islice(state.workers.where(WorkerState.RELEASED), count))
    slots = tuple(slot for worker in workers for slot in worker_slots(settings, worker))
    state = lease_slots(move_workers(state, workers, Cause.LEASE_GRANTED), slots, Holder.DRAFTER)
    state = replace(state, lease=DrafterLease(state.epoch, slots), lease_epoch=state.epoch)
    deadline_s = settings.activation_deadline_s
    command = ActivateDrafter(state.step, state.epoch, slots, deadline_s, state.versions)
    return Decision(state, (command,))
