"""Everything between two steps: start, resume, pause, evaluation and end of a run."""

from __future__ import annotations

from dataclasses import replace

from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.commands import (
    Evaluate,
    FinishRun,
    ResumeWorkers,
    SaveCheckpoints,
)
from paceline.services.coordinator.machine.decision import Decision
from paceline.services.coordinator.machine.losses import again_from, interrupted
from paceline.services.coordinator.machine.moves import free_slots, held_by, lease_slots
from paceline.services.coordinator.machine.schedule import evaluations_due
from paceline.services.coordinator.machine.slots import (
    Holder,
    Slot,
    WorkerState,
    slot_row,
    worker_row,
)
from paceline.services.coordinator.machine.state import (
    MachineError,
    Phase,
    State,
    with_learner,
    with_rollouts,
)


def run_started(state: State, event: events.RunStarted) -> Decision:
    """Frees all slots and sets all workers idle; the start policy may be evaluated first."""
    settings = event.settings
    state = State(
        settings=settings,
        slots=slot_row((Slot(),) * settings.slots),
        workers=worker_row((WorkerState.IDLE,) * settings.workers),
        versions=event.versions,
        seq=event.versions.seq,
        evaluations=evaluations_due(settings, 0),
    )
    return Decision(state, enters=Phase.RUNNING)


def resumed(state: State, event: events.Resumed) -> Decision:
    """Repeats every pending call of the run and its tracks, because the former coordinator's calls
    are gone.
    """
    total_steps = max(event.total_steps, state.rollouts.step)
    phase = state.failed_phase or state.phase
    state = replace(
        interrupted(state),
        settings=replace(state.settings, total_steps=total_steps),
        phase=phase,
        lost=frozenset(),
        lease=state.lease and replace(state.lease, preempting=False),
        failed_phase=None,
        failure="",
    )
    state = with_rollouts(state, drawing=False, attempts=0)
    state = with_learner(state, attempts=0)
    if phase is Phase.RUNNING:
        return Decision(state, enters=again_from(state.learner.phase))
    if phase in (Phase.CLOSING, Phase.FINISHED) and state.step < total_steps:
        phase = Phase.RUNNING
    return Decision(state, enters=phase)


def evaluate(state: State) -> Decision:
    """Leases the workers' slots to the engine and makes the first due evaluation."""
    state = _all_to_engine(state)
    command = Evaluate(state.step, state.epoch, state.evaluations[0], state.versions)
    return Decision(state, (command,))


def pause(state: State) -> Decision:
    """Leases the workers' slots to the engine, which serves callers until the run continues."""
    state = _all_to_engine(state)
    return Decision(state, (ResumeWorkers(state.step, state.epoch),))


def _all_to_engine(state: State) -> State:
    """The workers' slots leased under a new epoch, that of the phase's call."""
    state = free_slots(state, held_by(state, Holder.ENGINE), fence=True)
    state = lease_slots(state, range(state.settings.engine_slots), Holder.ENGINE)
    return replace(state, phase_epoch=state.epoch)


def evaluation_done(state: State, event: events.EvaluationDone) -> Decision:
    """Takes back the engine's slots. Raises MachineError for an evaluation that is not due."""
    if event.kind is not state.evaluations[0]:
        raise MachineError(f"EvaluationDone({event.kind})", state.describe())
    state = free_slots(state, held_by(state, Holder.ENGINE))
    return Decision(replace(state, evaluations=state.evaluations[1:]), enters=Phase.RUNNING)


def close(state: State) -> Decision:
    """Saves the trainers' checkpoints under a new epoch."""
    epoch = state.epoch + 1
    state = replace(state, epoch=epoch, phase_epoch=epoch)
    return Decision(state, (SaveCheckpoints(state.step, epoch),))


def checkpoints_saved(state: State, event: events.CheckpointsSaved) -> Decision:
    """Ends the run."""
    return Decision(state, enters=Phase.FINISHED)


def finish(state: State) -> Decision:
    """Ends the run; only Resumed with more steps continues it."""
    return Decision(replace(state, paused=False), (FinishRun(""),))


def stop_requested(state: State, event: events.StopRequested) -> Decision:
    """Makes the newest step with tasks drawn or being drawn the last step, and ends a pause."""
    last = min(state.settings.total_steps, state.rollouts.begun)
    settings = replace(state.settings, total_steps=last)
    return Decision(replace(state, settings=settings, paused=False))
