"""Commits version sets: the new policy, with the promoted drafter or after a drafter's rollback."""

from __future__ import annotations

from dataclasses import replace

from coordinator.machine.boundary import evaluations_due
from coordinator.machine.commands import AbortDrafter, CloseStep, Commit
from coordinator.machine.decision import Decision
from coordinator.machine.events import CommitFailed, Committed
from coordinator.machine.losses import try_again
from coordinator.machine.state import Phase, State
from paceline.trajectory import VersionSet


def serve(state: State) -> Decision:
    """Commits the set that has no answer yet, else the next one, under a new epoch so that whoever
    is late is refused.
    """
    versions, epoch = state.committing or _next_set(state), state.epoch + 1
    state = replace(state, epoch=epoch, phase_epoch=epoch, committing=versions, seq=versions.seq)
    return Decision(state, (Commit(state.step, epoch, versions),))


def committed(state: State, event: Committed) -> Decision:
    """Ends the step, or goes on to the new policy when the set took a drafter back."""
    served, rolled_back = state.versions, _is_rollback(state)
    state = replace(state, versions=event.versions, committing=None)
    if event.versions.drafter == state.promoted:
        state = replace(state, promoted=None)
    if event.versions.drafter != served.drafter:
        previous = None if rolled_back else served.drafter
        state = replace(state, previous_drafter=previous, rollback=False)
    if rolled_back:
        return Decision(state, enters=Phase.COMMIT)
    step = state.step
    due = evaluations_due(state.settings, step + 1)
    state = replace(state, step=step + 1, prepared=None, evaluations=due)
    return Decision(state, (CloseStep(step),), enters=Phase.READY)


def commit_failed(state: State, event: CommitFailed) -> Decision:
    """Gives a rollback up, leaves a promoted drafter out, pushes a policy again."""
    rejected = event.versions.drafter
    if _is_rollback(state):
        state = replace(state, rollback=False, previous_drafter=None, committing=None)
        return Decision(state, enters=Phase.COMMIT)
    if rejected == state.promoted:
        state, commands, _ = serve(replace(state, promoted=None, committing=None))
        # Under the epoch of the commit beside it: receivers refuse older ones.
        return Decision(state, (AbortDrafter(state.step, state.epoch, rejected), *commands))
    state = replace(state, committing=None)
    return try_again(state, Phase.POLICY, f"commit: {event.message}")


def _next_set(state: State) -> VersionSet:
    """A drafter rollback that is due, under its own seq, else the new policy.

    The rollback comes first because receivers keep the parts of the serving and the previous set
    only.
    """
    served = state.versions
    assert state.prepared is not None
    if state.rollback and state.promoted is None and state.previous_drafter is not None:
        return VersionSet(state.seq + 1, served.policy, state.previous_drafter)
    drafter = served.drafter if state.promoted is None else state.promoted
    return VersionSet(state.seq + 1, state.prepared, drafter)


def _is_rollback(state: State) -> bool:
    """Whether the set being committed changes the drafter only."""
    return state.committing is not None and state.committing.policy == state.versions.policy
