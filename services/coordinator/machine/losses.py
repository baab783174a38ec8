"""Continues after a loss: of a service, a rank, or a call that failed or took too long."""

from dataclasses import replace

from paceline.services.coordinator.machine import commands, drafter, events, slots
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.state import (
    OPTIONAL,
    MachineError,
    Phase,
    Service,
    State,
)

CALL_ATTEMPTS = 3
"""Number of times that a track's call may begin because of its service: a fault that returns twice
is no accident.
"""

CALLED_IN: dict[Phase, tuple[Service, ...]] = {
    Phase.EVALUATE: (Service.GATEWAY, Service.POLICY_TRAINER),  # the trainer repairs sets
    Phase.ROLLOUT: (Service.GATEWAY, Service.POLICY_TRAINER),
    Phase.POLICY: (Service.GATEWAY, Service.POLICY_TRAINER),
    Phase.COMMIT: (Service.GATEWAY,),
    Phase.PAUSED: (Service.GATEWAY,),
    Phase.CLOSING: (Service.POLICY_TRAINER,),
}
"""Services with a pending answer for a phase; when one is back, the phase's calls are
issued again.
"""


def service_lost(state: State, event: events.ServiceLost) -> Decision:
    """Waits for the service, frees its slots, and holds dependent calls."""
    if event.service in state.lost:
        return Decision(state)
    decision = Decision(replace(state, lost=state.lost | {event.service}))
    if event.service is Service.DRAFTER_TRAINER and state.lease is not None:
        decision = drafter.end_lease(decision.state, slots.Cause.PREEMPTED, fence=True)
    if event.service is Service.GATEWAY and Phase.ROLLOUT in state.phases:
        decision = drafter.preempt(decision.state)
    return decision._replace(commands=(commands.AwaitService(event.service), *decision.commands))


def service_back(state: State, event: events.ServiceBack) -> Decision:
    """Repeats the service's calls; the drafter may lease released slots."""
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
    """Continues without the drafter; repeats the policy step.

    Raises MachineError if the policy does not train.
    """
    if event.service is Service.DRAFTER_TRAINER:
        return drafter.end_lease(state, slots.Cause.PREEMPTED, fence=True)
    if state.learner.phase is not Phase.POLICY:
        raise MachineError(f"TrainerFailed({event.service})", state.describe())
    return train_again(state, f"{event.service}: {event.message}")


def deadline(state: State, event: events.Deadline) -> Decision:
    """Takes a late drafter's slots; fails the run for any other late service."""
    if event.what in ("activation", "join"):
        return drafter.preempt(state)
    if event.what == "preempt":
        return drafter.end_lease(state, slots.Cause.PREEMPTED, fence=True)
    return fail(state, f"{event.what} of step {state.step} took longer than {event.seconds:g} s")


def call_failed(state: State, event: events.CallFailed) -> Decision:
    """Fails the run, or frees the slots of an optional service and continues."""
    if event.service in OPTIONAL:
        if state.lease is None:
            return Decision(state)
        return drafter.end_lease(state, slots.Cause.PREEMPTED, fence=True)
    return fail(state, f"{event.service}: {event.call}: {event.message}")


def train_again(state: State, message: str) -> Decision:
    """Trains the batch again after a failed call, or fails the run after CALL_ATTEMPTS."""
    attempts = state.learner.attempts + 1
    if attempts >= CALL_ATTEMPTS:
        return fail(state, f"{message} (attempt {attempts} of {CALL_ATTEMPTS})")
    return Decision(state.with_learner(attempts=attempts), enters=Phase.PREEMPT)


def roll_out_again(state: State, message: str) -> Decision:
    """Runs the tasks again after a failed call, or fails the run after CALL_ATTEMPTS."""
    attempts = state.rollouts.attempts + 1
    if attempts >= CALL_ATTEMPTS:
        return fail(state, f"{message} (attempt {attempts} of {CALL_ATTEMPTS})")
    return Decision(interrupted(state).with_rollouts(attempts=attempts))


def interrupted(state: State) -> State:
    """Marks every call of the rollout track as to be issued again; late answers are refused."""
    if not any(draw.called for draw in state.rollouts.draws):
        return state
    draws = tuple(replace(draw, called=False) for draw in state.rollouts.draws)
    return state.with_rollouts(draws=draws)


def again_from(phase: Phase) -> Phase:
    """The phase to enter to issue a phase's call again: the policy needs its slots first."""
    return Phase.PREEMPT if phase is Phase.POLICY else phase


def fail(state: State, message: str) -> Decision:
    """Fails the run; Resumed continues it."""
    state = replace(state, failed_phase=state.phase, failure=message)
    return Decision(state, enters=Phase.FAILED)


def give_up(state: State) -> Decision:
    """Returns the slots to the engine, which serves callers, and ends the run."""
    lease = state.lease and replace(state.lease, preempting=True)
    state = replace(state, epoch=state.epoch + 1, lease=lease)
    policy = bool(state.held_by(slots.Holder.POLICY))
    hand_back = commands.HandBack(state.step, state.epoch, lease.epoch if lease else 0, policy)
    return Decision(state, (hand_back, commands.FinishRun(state.failure)))
