"""The learner: trains the policy, and commits version sets."""

from dataclasses import replace

from paceline.services.coordinator.machine import commands, events, losses, schedule
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.drafter import preempt
from paceline.services.coordinator.machine.slots import Cause, Holder, WorkerState
from paceline.services.coordinator.machine.state import MachineError, Phase, State
from paceline.trajectory import NUMBERS_PATH, VersionSet


def wait_for_slots(state: State) -> Decision:
    """Invalidates the epoch of a former call; the policy trains when drafter and rollouts have
    left.
    """
    return Decision(state.free_slots(state.held_by(Holder.POLICY), fence=True))


def train(state: State) -> Decision:
    """Leases the slots to the policy trainer under a new epoch."""
    slots = tuple(state.settings.policy_slots)
    state = state.lease_slots(slots, Holder.POLICY)
    state = state.with_learner(epoch=state.epoch)
    state = replace(state, committing=None, prepared=None)
    batch, version = state.learner.batch, state.versions.policy
    command = commands.TrainPolicy(state.step, state.epoch, slots, version, batch)
    return Decision(state, (command,))


def stepped(state: State, event: events.PolicyStepped) -> Decision:
    """Frees the slots during the push. If trains_during_push, the drafter may lease them until the
    commit.
    """
    state = _released(state, event)
    if schedule.trains_during_push(state):
        trained = list(state.workers.where(WorkerState.COMPLETED))
        state = state.move_workers(trained, Cause.POLICY_STEPPED)
    return Decision(state)


def prepared(state: State, event: events.PolicyPrepared) -> Decision:
    """Keeps the new policy at the gateway for its commit."""
    state = replace(_released(state, event), prepared=event.policy_version)
    return Decision(state, enters=Phase.DRAFTER)


def _released(state: State, event: events.PolicyStepped | events.PolicyPrepared) -> State:
    if event.policy_version != state.versions.policy + 1:
        raise MachineError(
            f"{type(event).__name__}(policy_version={event.policy_version})", state.describe()
        )
    return state.free_slots(state.held_by(Holder.POLICY))


def serve(state: State) -> Decision:
    """Commits the unanswered set, else the next set, under a new epoch that refuses late answers.
    It waits for rollouts of a single version and for a worker as canary. If the tracks take turns,
    the drafter leaves the slots of the next rollouts meanwhile.
    """
    if not schedule.may_commit(state) or (
        state.committing is None and not schedule.can_judge(state)
    ):
        return Decision(state)
    versions, epoch = state.committing or _next_set(state), state.epoch + 1
    state = replace(state, epoch=epoch, committing=versions, seq=versions.seq)
    state = state.with_learner(epoch=epoch)
    leased = tuple(state.workers.where(WorkerState.TRAINING))
    commit = commands.Commit(state.step, epoch, versions, leased)
    left = preempt(state) if state.settings.takes_turns else Decision(state)
    return Decision(left.state, (commit, *left.commands))


def committed(state: State, event: events.Committed) -> Decision:
    """Ends the step, or continues to the new policy after a rollback. Workers of the drafter's
    former lease may be leased again.
    """
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
    due = schedule.evaluations_due(state.settings, step + 1)
    draws = tuple(
        draw for draw in state.rollouts.draws if not draw.finished or draw.taken != draw.closed
    )
    state = state.with_rollouts(draws=draws, damaged=False)
    state = state.with_learner(step=step + 1, batch=())
    state = replace(state, prepared=None, evaluations=due)
    state = state.move_workers(state.workers.where(WorkerState.COMPLETED), Cause.COMMITTED)
    return Decision(state, (commands.CloseStep(step),), enters=Phase.IDLE)


def commit_failed(state: State, event: events.CommitFailed) -> Decision:
    """Drops the rollback that caused the failure, leaves out a promoted drafter, or pushes the
    policy again.
    """
    rejected = event.versions.drafter
    if _is_rollback(state):
        state = replace(state, rollback=False, previous_drafter=None, committing=None)
        return Decision(state, enters=Phase.COMMIT)
    if rejected == state.promoted:
        state, issued, _ = serve(replace(state, promoted=None, committing=None))
        abort = commands.AbortDrafter(state.step, state.lease_epoch, rejected)
        return Decision(state, (abort, *issued))
    return losses.train_again(replace(state, committing=None), f"commit: {event.message}")


def _next_set(state: State) -> VersionSet:
    """A pending drafter rollback under its own seq, else the new policy.

    The rollback precedes the policy, so a failed rollback does not take a policy with it.
    """
    served, former = state.versions, state.previous_drafter
    assert state.prepared is not None
    if state.rollback and state.promoted is None and former is not None:
        return VersionSet(state.seq + 1, served.policy, former, served.profile)
    drafter = served.drafter if state.promoted is None else state.promoted
    return VersionSet(state.seq + 1, state.prepared, drafter, _due_profile(state))


def _due_profile(state: State) -> str:
    """The profile of the next policy: the serving one. A profile that the audit found inexact is
    dropped if the engine can serve without it.
    """
    serving = state.versions.profile
    inexact = NUMBERS_PATH + serving in state.quarantined
    return "" if inexact and not state.settings.profile_stays else serving


def _is_rollback(state: State) -> bool:
    """Whether the set being committed changes the drafter only."""
    return state.committing is not None and state.committing.policy == state.versions.policy
