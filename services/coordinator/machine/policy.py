"""Trains the policy on all slots."""

from __future__ import annotations

from dataclasses import replace

from coordinator.machine.commands import TrainPolicy
from coordinator.machine.decision import Decision
from coordinator.machine.events import PolicyPrepared, PolicyStepped
from coordinator.machine.state import (
    Holder,
    MachineError,
    Phase,
    State,
    free_slots,
    held_by,
    lease_slots,
)


def train(state: State) -> Decision:
    """Leases all slots to the policy trainer under a new epoch; a former call's are fenced."""
    slots = tuple(range(len(state.slots)))
    state = free_slots(state, held_by(state, Holder.POLICY), fence=True)
    state = lease_slots(state, slots, Holder.POLICY)
    state = replace(state, phase_epoch=state.epoch, committing=None, prepared=None)
    return Decision(state, (TrainPolicy(state.step, state.epoch, slots, state.versions.policy),))


def stepped(state: State, event: PolicyStepped) -> Decision:
    """Frees the slots: the push needs none."""
    return Decision(_released(state, event))


def prepared(state: State, event: PolicyPrepared) -> Decision:
    """The new policy waits at the gateway for its commit."""
    state = replace(_released(state, event), prepared=event.policy_version)
    return Decision(state, enters=Phase.DRAFTER)


def _released(state: State, event: PolicyStepped | PolicyPrepared) -> State:
    if event.policy_version != state.versions.policy + 1:
        raise MachineError(
            f"{type(event).__name__}(policy_version={event.policy_version})", state.describe()
        )
    return free_slots(state, held_by(state, Holder.POLICY))
