"""Starts, resumes, evaluates and ends a run: everything between two steps."""

from __future__ import annotations

from dataclasses import replace

from coordinator.machine import events
from coordinator.machine.commands import BeginStep, Evaluate, FinishRun, SaveCheckpoints
from coordinator.machine.decision import Decision
from coordinator.machine.state import (
    IN_STEP,
    Evaluation,
    Holder,
    MachineError,
    Phase,
    RunSettings,
    Slot,
    State,
    WorkerState,
    free_slots,
    held_by,
    lease_slots,
    slot_row,
    worker_row,
)


def run_started(state: State, event: events.RunStarted) -> Decision:
    """All slots are free and all workers idle; the start policy may be evaluated first."""
    settings = event.settings
    state = State(
        settings=settings,
        slots=slot_row((Slot(),) * settings.slots),
        workers=worker_row((WorkerState.IDLE,) * settings.workers),
        versions=event.versions,
        seq=event.versions.seq,
        evaluations=evaluations_due(settings, 0),
    )
    return Decision(state, enters=Phase.READY)


def resumed(state: State, event: events.Resumed) -> Decision:
    """Enters the phase again, or the one that failed: every call of the former coordinator is
    gone.
    """
    settings = replace(state.settings, total_steps=max(event.total_steps, state.step))
    phase = state.failed_phase or state.phase
    state = replace(
        state,
        settings=settings,
        phase=phase,
        lost=frozenset(),
        attempts=0,
        lease=state.lease and replace(state.lease, preempting=False),
        failed_phase=None,
        failure="",
    )
    if phase in (Phase.CLOSING, Phase.FINISHED) and state.step < settings.total_steps:
        phase = Phase.READY
    return Decision(state, enters=phase)


def next_step(state: State) -> Decision:
    """Evaluates, closes the run or begins the next step, in this order."""
    if state.evaluations:
        return Decision(state, enters=Phase.EVALUATE)
    if state.step >= state.settings.total_steps:
        return Decision(state, enters=Phase.CLOSING)
    return Decision(state, (BeginStep(state.step),))


def evaluate(state: State) -> Decision:
    """Leases all slots to the engine and makes the first evaluation that is due."""
    state = free_slots(state, held_by(state, Holder.ENGINE), fence=True)
    state = lease_slots(state, range(len(state.slots)), Holder.ENGINE)
    state = replace(state, phase_epoch=state.epoch)
    command = Evaluate(state.step, state.epoch, state.evaluations[0], state.versions)
    return Decision(state, (command,))


def evaluation_done(state: State, event: events.EvaluationDone) -> Decision:
    """Takes the engine's slots back."""
    if event.kind is not state.evaluations[0]:
        raise MachineError(f"EvaluationDone({event.kind})", state.describe())
    state = free_slots(state, held_by(state, Holder.ENGINE))
    return Decision(replace(state, evaluations=state.evaluations[1:]), enters=Phase.READY)


def evaluations_due(settings: RunSettings, finished: int) -> tuple[Evaluation, ...]:
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


def close(state: State) -> Decision:
    """Saves the trainers' checkpoints under a new epoch."""
    epoch = state.epoch + 1
    state = replace(state, epoch=epoch, phase_epoch=epoch)
    return Decision(state, (SaveCheckpoints(state.step, epoch),))


def checkpoints_saved(state: State, event: events.CheckpointsSaved) -> Decision:
    """The run is over."""
    return Decision(state, enters=Phase.FINISHED)


def finish(state: State) -> Decision:
    """Ends the run; only Resumed with more steps goes on from here."""
    return Decision(state, (FinishRun(""),))


def stop_requested(state: State, event: events.StopRequested) -> Decision:
    """Makes the running step, or the one that is about to begin, the last one."""
    running = state.phase is Phase.READY or state.phase in IN_STEP
    last = min(state.settings.total_steps, state.step + (1 if running else 0))
    return Decision(replace(state, settings=replace(state.settings, total_steps=last)))
