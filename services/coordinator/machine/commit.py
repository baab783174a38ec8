"""Commits version sets: the new policy with the promoted drafter, after a drafter's rollback, or
with a pinned drafter.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.services.coordinator.machine.choice import due_drafter, due_profile
from paceline.services.coordinator.machine.commands import AbortDrafter, CloseStep, Commit
from paceline.services.coordinator.machine.decision import Decision
from paceline.services.coordinator.machine.drafter import preempt
from paceline.services.coordinator.machine.events import CommitFailed, Committed
from paceline.services.coordinator.machine.losses import train_again
from paceline.services.coordinator.machine.moves import move_workers
from paceline.services.coordinator.machine.schedule import can_judge, evaluations_due, may_commit
from paceline.services.coordinator.machine.slots import Cause, WorkerState
from paceline.services.coordinator.machine.state import (
    DrafterPin,
    Phase,
    State,
    with_learner,
    with_rollouts,
)
from paceline.trajectory import VersionSet


def serve(state: State) -> Decision:
    """Commits the unanswered set, else the next set, under a new epoch that refuses late answers.
    It waits for rollouts of a single version and for a worker as canary. If the tracks take turns,
    the drafter leaves the slots of the next rollouts meanwhile.
    """
    if not may_commit(state) or (state.committing is None and not can_judge(state)):
        return Decision(state)
    versions, epoch = state.committing or _next_set(state), state.epoch + 1
    state = replace(state, epoch=epoch, committing=versions, seq=versions.seq)
    state = with_learner(state, epoch=epoch)
    leased = tuple(state.workers.where(WorkerState.TRAINING))
    commit = Commit(state.step, epoch, versions, leased)
    left = preempt(state) if state.settings.takes_turns else Decision(state)
    return Decision(left.state, (commit, *left.commands))


def committed(state: State, event: Committed) -> Decision:
    """Ends the step, or continues to the new policy after a rollback. Workers of the drafter's
    former lease may be leased again.
    """
    served, rolled_back = state.versions, _is_rollback(state)
    state = replace(state, versions=event.versions, committing=None)
    if event.versions.profile == state.profile:
        state = replace(state, profile=None)
    if event.versions.drafter == state.promoted:
        state = replace(state, promoted=None)
    if event.versions.drafter != served.drafter:
        previous = None if rolled_back else served.drafter
        state = replace(state, previous_drafter=previous, rollback=False)
    if rolled_back:
        return Decision(state, enters=Phase.COMMIT)
    if state.pin == DrafterPin(event.versions.drafter, lasting=False):
        state = replace(state, pin=None)
    step = state.step
    due = evaluations_due(state.settings, step + 1)
    draws = tuple(
        draw for draw in state.rollouts.draws if not draw.finished or draw.taken != draw.closed
    )
    state = with_rollouts(state, draws=draws, damaged=False)
    state = with_learner(state, step=step + 1, batch=())
    state = replace(state, prepared=None, evaluations=due)
    state = move_workers(state, state.workers.where(WorkerState.COMPLETED), Cause.COMMITTED)
    return Decision(state, (CloseStep(step),), enters=Phase.IDLE)


def commit_failed(state: State, event: CommitFailed) -> Decision:
    """Drops the rollback, the pin or the profile that caused the failure, leaves out a promoted
    drafter, or pushes the policy again.
    """
    rejected = event.versions.drafter
    if _is_rollback(state):
        pin = state.pin if state.pin is not None and state.pin.version != rejected else None
        state = replace(state, rollback=False, previous_drafter=None, committing=None, pin=pin)
        return Decision(state, enters=Phase.COMMIT)
    if state.profile is not None and event.versions.profile == state.profile:
        return serve(replace(state, profile=None, committing=None))
    if rejected == state.promoted:
        state, commands, _ = serve(replace(state, promoted=None, committing=None))
        abort = AbortDrafter(state.step, state.lease_epoch, rejected)
        return Decision(state, (abort, *commands))
    return train_again(replace(state, committing=None), f"commit: {event.message}")


def _next_set(state: State) -> VersionSet:
    """A pending drafter rollback under its own seq, else the new policy.

    The rollback precedes the policy, so a failed rollback does not take a policy with it.
    """
    served, due = state.versions, due_drafter(state)
    assert state.prepared is not None
    if due != served.drafter:
        return VersionSet(state.seq + 1, served.policy, due, served.profile)
    waits = state.promoted is None or state.pin is not None
    drafter = served.drafter if waits else state.promoted
    assert drafter is not None
    return VersionSet(state.seq + 1, state.prepared, drafter, due_profile(state))


def _is_rollback(state: State) -> bool:
    """Whether the set being committed changes the drafter only."""
    return state.committing is not None and state.committing.policy == state.versions.policy
