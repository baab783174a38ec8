"""The calls that the machine can decide on, and the leases they need. Owns no events (machine.py).

Standard library only, no clock, no randomness. Every function takes a state and returns the state
that waits for the call, with the call's command.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.machine.commands import (
    ActivateDrafter,
    BeginStep,
    Command,
    Commit,
    Evaluate,
    FinishRun,
    PreemptDrafter,
    RunTasks,
    SaveCheckpoints,
    TrainPolicy,
)
from coordinator.machine.state import (
    Cause,
    DrafterLease,
    Evaluation,
    Holder,
    Phase,
    Service,
    Settings,
    State,
    Versions,
    WorkerState,
    free_slots,
    held_by,
    lease_slots,
    move_workers,
    worker_slots,
)

Outcome = tuple[State, tuple[Command, ...]]


def next_call(state: State) -> Outcome:
    """Between two steps: evaluate, close the run or begin the next step, in this order."""
    state = free_slots(state, held_by(state, Holder.ENGINE), fence=True)
    if state.evaluations:
        state = lease_slots(state, range(len(state.slots)), Holder.ENGINE)
        state = replace(state, phase=Phase.EVALUATE, phase_epoch=state.epoch)
        return state, (Evaluate(state.evaluations[0], state.step, state.epoch),)
    if state.step >= state.settings.total_steps:
        state = replace(
            state, phase=Phase.CLOSING, epoch=state.epoch + 1, phase_epoch=state.epoch + 1
        )
        return state, (SaveCheckpoints(state.step, state.epoch),)
    return replace(state, phase=Phase.READY), (BeginStep(state.step),)


def evaluations_due(settings: Settings, finished: int) -> tuple[Evaluation, ...]:
    """Evaluations to make when that many steps are finished."""
    ends = finished in (0, settings.total_steps)
    due: list[Evaluation] = []
    if settings.accuracy_enabled and (
        ends or (settings.accuracy_every and finished % settings.accuracy_every == 0)
    ):
        due.append(Evaluation.ACCURACY)
    if settings.probe_enabled and (
        ends or (settings.probe_every and finished % settings.probe_every == 0)
    ):
        due.append(Evaluation.PROBE)
    return tuple(due)


def generate(state: State) -> Outcome:
    """All slots to the engine under a new epoch, all workers GENERATING."""
    state = free_slots(state, held_by(state, Holder.ENGINE), fence=True)
    waiting = [i for i, worker in enumerate(state.workers) if worker is not WorkerState.GENERATING]
    state = move_workers(state, waiting, Cause.STEP_BEGAN)
    state = lease_slots(state, range(len(state.slots)), Holder.ENGINE)
    state = replace(state, phase=Phase.ROLLOUT, phase_epoch=state.epoch, rollout_restart=False)
    return state, (RunTasks(state.step, state.epoch),)


def run_tasks_again(state: State) -> Outcome:
    """Issues the step's tasks again; every worker may get samples, so the drafter leaves first."""
    if state.lease is None:
        return generate(state)
    return preempt(replace(state, rollout_restart=True))


def lease_drafter(state: State) -> Outcome:
    """Leases released slots to the drafter while others still generate."""
    settings = state.settings
    released = [i for i, worker in enumerate(state.workers) if worker is WorkerState.RELEASED]
    wanted = (
        drafter_due(state)
        and not settings.serial_drafter
        and WorkerState.GENERATING in state.workers
        and len(released) >= settings.min_workers_for_training
    )
    return _lease(state, released) if wanted else (state, ())


def drafter_due(state: State) -> bool:
    """Whether the drafter may train in this step: it is one of its steps, its trainer is there and
    holds nothing.
    """
    settings = state.settings
    return (
        settings.drafter_enabled
        and state.step % settings.training_interval_steps == 0
        and state.lease is None
        and Service.DRAFTER_TRAINER not in state.lost
    )


def train_drafter(state: State) -> Outcome:
    """The serial schedule: the drafter has its slots while everybody waits; the set follows when it
    has left them.

    Once a step: after a failed commit its workers are COMPLETED, and the set is committed as it is.
    """
    released = [i for i, worker in enumerate(state.workers) if worker is WorkerState.RELEASED]
    if not (state.settings.serial_drafter and drafter_due(state) and released):
        return commit_prepared(state)
    return _lease(replace(state, phase=Phase.DRAFTER), released)


def _lease(state: State, released: list[int]) -> Outcome:
    settings = state.settings
    workers = released[: max(1, settings.max_drafter_slots // settings.slots_per_worker)]
    slots = tuple(slot for worker in workers for slot in worker_slots(settings, worker))
    state = lease_slots(move_workers(state, workers, Cause.LEASE_GRANTED), slots, Holder.DRAFTER)
    state = replace(state, lease=DrafterLease(state.epoch, slots), lease_epoch=state.epoch)
    command = ActivateDrafter(
        state.step, state.epoch, slots, settings.activation_deadline_s, state.versions
    )
    return state, (command,)


def preempt(state: State) -> Outcome:
    """Asks for the drafter's slots, once per lease; nothing to do without a lease."""
    lease = state.lease
    if lease is None or lease.preempting:
        return state, ()
    state = replace(state, lease=replace(lease, preempting=True))
    return state, (PreemptDrafter(state.step, lease.epoch, state.settings.preempt_deadline_s),)


def train_policy(state: State) -> Outcome:
    """All slots to the policy trainer under a new epoch; slots of a former attempt are fenced."""
    state = free_slots(state, held_by(state, Holder.POLICY), fence=True)
    state = lease_slots(state, range(len(state.slots)), Holder.POLICY)
    state = replace(
        state, phase=Phase.POLICY, phase_epoch=state.epoch, committing=None, prepared=None
    )
    slots = tuple(range(len(state.slots)))
    return state, (TrainPolicy(state.step, state.epoch, slots, state.versions.policy),)


def commit_prepared(state: State) -> Outcome:
    """The new policy with the promoted drafter; before it, under its own seq, a drafter rollback
    that is due.

    The rollback comes first because receivers keep the parts of the serving and the previous set
    only.
    """
    served = state.versions
    assert state.prepared is not None
    if state.rollback and state.promoted is None and state.previous_drafter is not None:
        return commit(state, Versions(state.seq + 1, served.policy, state.previous_drafter))
    drafter = served.drafter if state.promoted is None else state.promoted
    return commit(state, Versions(state.seq + 1, state.prepared, drafter))


def commit(state: State, versions: Versions) -> Outcome:
    """Waits for a set to serve, under a new epoch so that whoever is late is refused."""
    epoch = state.epoch + 1
    state = replace(
        state,
        phase=Phase.COMMIT,
        epoch=epoch,
        phase_epoch=epoch,
        committing=versions,
        seq=versions.seq,
    )
    return state, (Commit(state.step, epoch, versions),)


def is_rollback(state: State) -> bool:
    """Whether the set being committed changes the drafter only."""
    return state.committing is not None and state.committing.policy == state.versions.policy


def fail_if_exhausted(state: State, message: str) -> Outcome | None:
    """A failed run when the phase's call has begun too often, else None."""
    if state.attempts + 1 < state.settings.call_attempts:
        return None
    return fail(
        state, f"{message} (attempt {state.attempts + 1} of {state.settings.call_attempts})"
    )


def attempted(state: State) -> State:
    """One attempt of the phase's call more."""
    return replace(state, attempts=state.attempts + 1)


def fail(state: State, message: str) -> Outcome:
    """Ends the run for now; Resumed takes the phase up again."""
    stop = preempt(state)[1] if state.lease else ()
    return replace(state, phase=Phase.FAILED, failed_phase=state.phase, failure=message), (
        *stop,
        FinishRun(message),
    )
