"""Leases released slots to the drafter trainer and takes them back; records its gate's
decisions.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile

from paceline.services.coordinator.machine import commands, events, schedule
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.slots import Cause, DrafterLease, Holder, WorkerState
from paceline.services.coordinator.machine.state import OPTIONAL, Phase, Service, State

FROZEN_INTERVAL_STEPS = 5
"""RL steps between two checks of a frozen drafter. Meanwhile it gets no slots, and no rows are
captured.
"""
FROZEN = "frozen"
"""Reason of a Detached by a trainer that gains nothing at present."""


def lease_released(state: State) -> Decision | None:
    """Leases released slots to the drafter while rollouts, the policy on its own slots, or a push
    are in progress. Further slots join a lease once it trains. During a commit no slot is leased,
    because a released worker may be the canary.
    """
    settings, workers = state.settings, state.workers
    policy_apart = not settings.colocated and state.learner.phase is not Phase.IDLE
    while_pushing = schedule.trains_during_push(state)
    if (
        settings.serial_drafter
        or state.committing is not None
        or state.lost - OPTIONAL  # then the tasks run again, on all workers
        or not (workers.counted(WorkerState.GENERATING) or policy_apart or while_pushing)
    ):
        return None
    if state.lease is not None:
        return _widen(state, state.lease)
    return _lease(state) if any_released(state) and _due(state) else None


def train_alone(state: State) -> Decision:
    """In the serial schedule, trains the drafter while the other services wait; the commit follows.

    It trains once per step. After a failed commit its workers are COMPLETED, and the set is
    committed as it is.
    """
    if not state.settings.serial_drafter:  # a harvesting drafter may continue beside the commit
        return Decision(state, enters=Phase.COMMIT)
    if state.lease is not None:  # a former coordinator's lease: the call is lost
        return preempt(state)
    if _due(state) and any_released(state):
        return _lease(state)
    return Decision(state, enters=Phase.COMMIT)


def preempt(state: State) -> Decision:
    """Requests the drafter's slots, once per lease; no effect without a lease."""
    lease = state.lease
    if lease is None or lease.preempting:
        return Decision(state)
    state = replace(state, lease=replace(lease, preempting=True))
    return Decision(state, (commands.PreemptDrafter(state.step, lease.epoch),))


def noted(state: State, event: events.GateDecided | events.WorkersReleased) -> Decision:
    """Records the event only."""
    return Decision(state)


def attached(state: State, event: events.DrafterActivated | events.DrafterJoined) -> Decision:
    """Records the slots that the trainer uses. Slots released meanwhile may join the lease next:
    only one change of a lease is in progress at a time.
    """
    assert state.lease is not None
    known = state.lease.attached
    if isinstance(event, events.DrafterActivated):
        slots = known or len(state.lease.slots)
    else:
        slots = max(known, event.slots)
    return Decision(replace(state, lease=replace(state.lease, attached=slots)))


def end_activation(state: State, event: events.JoinFailed | events.TrafficWaits) -> Decision:
    """Ends the whole lease: for waiting callers, or because its slots are uncertain. Its workers
    are not leased again in this step.
    """
    return preempt(state)


def promoted(state: State, event: events.GatePromoted) -> Decision:
    """Keeps the candidate for the next commit, and aborts an older waiting candidate.

    A prepared candidate needs no slot: it counts even when Preempted arrived first.
    """
    older = state.promoted
    version = event.drafter_version
    state = replace(state, promoted=version, candidate=(event.epoch, version))
    if older is None or older == version:
        return Decision(state)
    if state.committing is not None and state.committing.drafter == older:
        return Decision(state)  # about to serve
    return Decision(state, (commands.AbortDrafter(state.step, state.lease_epoch, older),))


def preempted(state: State, event: events.Preempted) -> Decision:
    """Ends the lease."""
    return end_lease(state, Cause.PREEMPTED)


def detached(state: State, event: events.Detached) -> Decision:
    """Ends the lease after training or preemption. A frozen drafter rests."""
    if event.reason == FROZEN:
        state = replace(state, drafter_rests_until=state.step + FROZEN_INTERVAL_STEPS)
    return end_lease(state, Cause.PREEMPTED if event.reason == "preempted" else Cause.DRAFTER_DONE)


def end_lease(state: State, cause: Cause, *, fence: bool = False) -> Decision:
    """Frees the drafter's slots.

    `fence`: the drafter trainer has not confirmed that it left, and gets no other slots before the
    next finished share. A trainer that is done may get slots released meanwhile.
    """
    assert state.lease is not None
    slots = state.lease.slots
    workers = sorted({slot // state.settings.slots_per_worker for slot in slots})
    state = state.move_workers(workers, cause).free_slots(slots, fence=fence)
    state = replace(state, lease=None, drafter_benched=fence)
    serial = state.learner.phase is Phase.DRAFTER
    return Decision(state, enters=Phase.COMMIT if serial else None)


def acceptance_fell(state: State, event: events.AcceptanceFell) -> Decision:
    """Schedules a rollback to the former drafter, if it was kept."""
    serving = event.drafter_version == state.versions.drafter
    if not serving or state.previous_drafter is None:
        return commands.refused(state, event, event.drafter_version, state.versions.drafter)
    return Decision(replace(state, rollback=True))


def captured(state: State, step: int) -> bool:
    """Whether a step's rollouts capture rows for the drafter: it is trained, and not frozen beyond
    that step.
    """
    return state.settings.drafter_enabled and step >= state.drafter_rests_until


def wanted(state: State) -> bool:
    """Whether the drafter trains in this step."""
    due = state.step % state.settings.training_interval_steps == 0
    return captured(state, state.step) and due


def _due(state: State) -> bool:
    """Whether the drafter should train now: its trainer is present and has no lease."""
    return (
        wanted(state)
        and state.lease is None
        and not state.drafter_benched
        and Service.DRAFTER_TRAINER not in state.lost
    )


def most_workers(settings: RunSettings) -> int:
    """Maximum workers with slots leased to the drafter."""
    there = settings.leasable_workers or settings.workers
    return max(1, min(there, settings.max_drafter_slots // settings.slots_per_worker))


def any_released(state: State) -> bool:
    """Whether a worker is released that the drafter may compute on."""
    return any(True for _ in _released(state))


def _released(state: State) -> Iterator[int]:
    """Released workers that the drafter may compute on, in ascending order."""
    there = state.settings.leasable_workers or state.settings.workers
    return takewhile(lambda worker: worker < there, state.workers.where(WorkerState.RELEASED))


def _lease(state: State) -> Decision:
    state, slots = _lease_more(state, None)
    state = replace(state, lease=DrafterLease(state.epoch, slots), lease_epoch=state.epoch)
    command = commands.ActivateDrafter(state.step, state.epoch, slots, state.versions)
    return Decision(state, (command,))


def _widen(state: State, lease: DrafterLease) -> Decision | None:
    """Adds slots under the lease's epoch, which ends for all its slots at once."""
    if lease.preempting or lease.attached < len(lease.slots):
        return None
    state, joining = _lease_more(state, lease)
    if not joining:
        return None
    slots = lease.slots + joining
    state = replace(state, lease=replace(lease, slots=slots))
    command = commands.JoinDrafter(state.step, lease.epoch, slots, joining)
    return Decision(state, (command,))


def _lease_more(state: State, lease: DrafterLease | None) -> tuple[State, tuple[int, ...]]:
    """Leases as many released slots as the drafter may hold beside its lease."""
    settings, held = state.settings, len(lease.slots) if lease else 0
    count = max(0, most_workers(settings) - held // settings.slots_per_worker)
    workers = list(islice(_released(state), count))
    slots = tuple(slot for worker in workers for slot in settings.worker_slots(worker))
    state = state.move_workers(workers, Cause.LEASE_GRANTED)
    if slots:
        under = lease.epoch if lease else None
        state = state.lease_slots(slots, Holder.DRAFTER, under=under)
    return state, slots
