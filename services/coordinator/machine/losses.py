"""Goes on after what was lost: services, ranks, calls that failed or took too long."""

from __future__ import annotations

from dataclasses import replace

from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.commands import AwaitService, FinishRun, HandBack
from paceline.services.coordinator.machine.decision import Decision
from paceline.services.coordinator.machine.drafter import end_lease, preempt
from paceline.services.coordinator.machine.moves import held_by
from paceline.services.coordinator.machine.slots import Cause, Holder
from paceline.services.coordinator.machine.state import (
    OPTIONAL,
    MachineError,
    Phase,
    Service,
    State,
    with_learner,
    with_rollouts,
)

CALL_ATTEMPTS = 3
"""Times that a track's call may begin because of its service: a fault that comes back twice is no
accident.
"""

CALLED_IN: dict[Phase, tuple[Service, ...]] = {
    Phase.EVALUATE: (Service.GATEWAY, Service.POLICY_TRAINER),  # which mends what is to serve
    Phase.ROLLOUT: (Service.GATEWAY, Service.POLICY_TRAINER),
    Phase.POLICY: (Service.GATEWAY, Service.POLICY_TRAINER),
    Phase.COMMIT: (Service.GATEWAY,),
    Phase.PAUSED: (Service.GATEWAY,),
    Phase.CLOSING: (Service.POLICY_TRAINER,),
}
"""Services whose answer a phase waits for: when one comes back the phase's calls are made again."""


def service_lost(state: State, event: events.ServiceLost) -> Decision:
    """Waits for the service; what it held of slots is free, what needs it waits too."""
    if event.service in state.lost:
        return Decision(state)
    decision = Decision(replace(state, lost=state.lost | {event.service}))
    if event.service is Service.DRAFTER_TRAINER and state.lease is not None:
        decision = end_lease(decision.state, Cause.PREEMPTED, fence=True)
    if event.service is Service.GATEWAY and Phase.ROLLOUT in state.phases:
        decision = preempt(decision.state)
    return decision._replace(commands=(AwaitService(event.service), *decision.commands))


def service_back(state: State, event: events.ServiceBack) -> Decision:
    """Makes those calls again that were the service's; the drafter gets released slots."""
    service = event.service
    if service not in state.lost:
        return Decision(state)
    state = replace(state, lost=state.lost - {service})
    if service is Service.DRAFTER_TRAINER:
        return Decision(replace(state, drafter_benched=False))
    if service in CALLED_IN[Phase.ROLLOUT]:
        state = interrupted(state)
    running = state.phase is Phase.RUNNING
    phase = state.learner.phase if running else state.phase
    called = service in CALLED_IN.get(phase, ())
    return Decision(state, enters=again_from(phase) if called else None)


def trainer_failed(state: State, event: events.TrainerFailed) -> Decision:
    """The run goes on without the drafter; the policy step begins again."""
    if event.service is Service.DRAFTER_TRAINER:
        return end_lease(state, Cause.PREEMPTED, fence=True)
    if state.learner.phase is not Phase.POLICY:
        raise MachineError(f"TrainerFailed({event.service})", state.describe())
    return train_again(state, f"{event.service}: {event.message}")


def deadline(state: State, event: events.Deadline) -> Decision:
    """Takes the drafter's slots when it was late, fails the run when anybody else was."""
    if event.what in ("activation", "join"):
        return preempt(state)
    if event.what == "preempt":
        return end_lease(state, Cause.PREEMPTED, fence=True)
    return fail(state, f"{event.what} of step {state.step} took longer than {event.seconds:g} s")


def call_failed(state: State, event: events.CallFailed) -> Decision:
    """Fails the run; an optional service's goes on, and what it held of slots is free."""
    if event.service in OPTIONAL:
        leased = state.lease is not None
        return end_lease(state, Cause.PREEMPTED, fence=True) if leased else Decision(state)
    return fail(state, f"{event.service}: {event.call}: {event.message}")


def train_again(state: State, message: str) -> Decision:
    """Trains the batch again because of a call's failure, or fails the run after CALL_ATTEMPTS."""
    attempts = state.learner.attempts + 1
    if attempts >= CALL_ATTEMPTS:
        return fail(state, f"{message} (attempt {attempts} of {CALL_ATTEMPTS})")
    return Decision(with_learner(state, attempts=attempts), enters=Phase.PREEMPT)


def roll_out_again(state: State, message: str) -> Decision:
    """Runs the tasks again because of a call's failure, or fails the run after CALL_ATTEMPTS."""
    attempts = state.rollouts.attempts + 1
    if attempts >= CALL_ATTEMPTS:
        return fail(state, f"{message} (attempt {attempts} of {CALL_ATTEMPTS})")
    return Decision(with_rollouts(interrupted(state), attempts=attempts))


def interrupted(state: State) -> State:
    """Every call of the rollout track is to be made again; what it still answers is late."""
    if not any(draw.called for draw in state.rollouts.draws):
        return state
    draws = tuple(replace(draw, called=False) for draw in state.rollouts.draws)
    return with_rollouts(state, draws=draws)


def again_from(phase: Phase) -> Phase:
    """The phase to enter for a phase's call to be made again: the policy needs its slots first."""
    return Phase.PREEMPT if phase is Phase.POLICY else phase


def fail(state: State, message: str) -> Decision:
    """Ends the run for now; Resumed goes on from here."""
    state = replace(state, failed_phase=state.phase, failure=message)
    return Decision(state, enters=Phase.FAILED)


def give_up(state: State) -> Decision:
    """Gives the slots back to the engine, for whoever asks it, and ends the run."""
    lease = state.lease and replace(state.lease, preempting=True)
    state = replace(state, epoch=state.epoch + 1, lease=lease)
    policy = bool(held_by(state, Holder.POLICY))
    hand_back = HandBack(state.step, state.epoch, lease.epoch if lease else 0, policy)
    return Decision(state, (hand_back, FinishRun(state.failure)))
