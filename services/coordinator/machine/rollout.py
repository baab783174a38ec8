"""Rolls a step out: every worker gets its share, and releases its slots when that is done."""

from __future__ import annotations

from dataclasses import replace

from coordinator.machine.commands import RunTasks
from coordinator.machine.decision import Decision
from coordinator.machine.drafter import lease_released, preempt
from coordinator.machine.events import ShareDone, StepBegan, TasksFinished, WorkerLost
from coordinator.machine.losses import try_again
from coordinator.machine.state import (
    Cause,
    Holder,
    MachineError,
    Phase,
    State,
    WorkerState,
    free_slots,
    held_by,
    lease_slots,
    move_workers,
    worker_slots,
)


def step_began(state: State, event: StepBegan) -> Decision:
    """Rolls the step out."""
    return Decision(replace(state, attempts=0), enters=Phase.ROLLOUT)


def generate(state: State) -> Decision:
    """Leases all slots to the engine under a new epoch and runs the tasks.

    When the tasks run again every worker may get samples, so the drafter leaves first.
    """
    if state.lease is not None:
        epoch = state.epoch + 1  # the former call's answers are late from now on
        return preempt(replace(state, epoch=epoch, phase_epoch=epoch, rollout_restart=True))
    state = free_slots(state, held_by(state, Holder.ENGINE), fence=True)
    waiting = [i for i, worker in enumerate(state.workers) if worker is not WorkerState.GENERATING]
    state = move_workers(state, waiting, Cause.STEP_BEGAN)
    state = lease_slots(state, range(len(state.slots)), Holder.ENGINE)
    state = replace(state, phase_epoch=state.epoch, rollout_restart=False)
    return Decision(state, (RunTasks(state.step, state.epoch, state.versions),))


def share_done(state: State, event: ShareDone) -> Decision:
    """Releases the worker's slots; the drafter may get them while others generate."""
    if event.worker >= len(state.workers):
        raise MachineError(f"ShareDone(worker={event.worker})", state.describe())
    return lease_released(_release(state, [event.worker]))


def tasks_finished(state: State, event: TasksFinished) -> Decision:
    """Releases the workers that still hold slots; the policy step needs all of them."""
    state = _release(state, list(state.workers.where(WorkerState.GENERATING)))
    return Decision(replace(state, attempts=0), enters=Phase.PREEMPT)


def worker_lost(state: State, event: WorkerLost) -> Decision:
    """Runs the tasks again: the gateway restarts the worker."""
    return try_again(state, Phase.ROLLOUT, f"worker {event.worker} of the gateway died")


def _release(state: State, workers: list[int]) -> State:
    slots = [slot for worker in workers for slot in worker_slots(state.settings, worker)]
    return free_slots(move_workers(state, workers, Cause.SHARE_DONE), slots)
