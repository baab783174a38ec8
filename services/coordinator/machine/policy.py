"""Trains the policy: on all slots if rollouts and policy are colocated, else on its own slots."""

from __future__ import annotations

from dataclasses import replace

from paceline.services.coordinator.machine.commands import TrainPolicy
from paceline.services.coordinator.machine.decision import Decision
from paceline.services.coordinator.machine.events import PolicyPrepared, PolicyStepped
from paceline.services.coordinator.machine.moves import (
    free_slots,
    held_by,
    lease_slots,
    move_workers,
)
from paceline.services.coordinator.machine.schedule import trains_during_push
from paceline.services.coordinator.machine.slots import Cause, Holder, WorkerState
from paceline.services.coordinator.machine.state import MachineError, Phase, State, with_learner


def wait_for_slots(state: State) -> Decision:
    """Invalidates the epoch of a former call; the policy trains when drafter and rollouts have
    left.
    """
    return Decision(free_slots(state, held_by(state, Holder.POLICY), fence=True))


def train(state: State) -> Decision:
    """Leases the slots to the policy trainer under a new epoch."""
    slots = tuple(state.settings.policy_slots)
    state = lease_slots(state, slots, Holder.POLICY)
    state = with_learner(state, epoch=state.epoch)
    state = replace(state, committing=None, prepared=None)
    batch, version = state.learner.batch, state.versions.policy
    command = TrainPolicy(state.step, state.epoch, slots, version, batch)
    return Decision(state, (command,))


def stepped(state: State, event: PolicyStepped) -> Decision:
    """Frees the slots during the push. If trains_during_push, the drafter may lease them until the
    commit.
    """
    state = _released(state, event)
    if trains_during_push(state):
        trained = list(state.workers.where(WorkerState.COMPLETED))
        state = move_workers(state, trained, Cause.POLICY_STEPPED)
    return Decision(state)


def prepared(state: State, event: PolicyPrepared) -> Decision:
    """Keeps the new policy at the gateway for its commit."""
    state = replace(_released(state, event), prepared=event.policy_version)
    return Decision(state, enters=Phase.DRAFTER)


def _released(state: State, event: PolicyStepped | PolicyPrepared) -> State:
    if event.policy_version != state.versions.policy + 1:
        raise MachineError(
            f"{type(event).__name__}(policy_version={event.policy_version})", state.describe()
        )
    return free_slots(state, held_by(state, Holder.POLICY))
