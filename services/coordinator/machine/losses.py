"""Goes on after what was lost: services, ranks, calls that failed or took too long."""

from __future__ import annotations

from dataclasses import replace

from coordinator.machine import events
from coordinator.machine.commands import AwaitService, FinishRun
from coordinator.machine.decision import Decision
from coordinator.machine.drafter import end_lease, lease_released, preempt
from coordinator.machine.state import OPTIONAL, Cause, MachineError, Phase, Service, State

CALL_ATTEMPTS = 3
"""Times that a phase's call may begin because of its service: a fault that comes back twice is no
accident.
"""

CALLED_IN: dict[Phase, tuple[Service, ...]] = {
    Phase.EVALUATE: (Service.GATEWAY, Service.POLICY_TRAINER),  # which mends what is to serve
    Phase.ROLLOUT: (Service.GATEWAY, Service.POLICY_TRAINER),
    Phase.POLICY: (Service.GATEWAY, Service.POLICY_TRAINER),
    Phase.COMMIT: (Service.GATEWAY,),
    Phase.CLOSING: (Service.POLICY_TRAINER,),
}
"""Services whose answer a phase waits for: when one comes back the phase's call is made again."""


def service_lost(state: State, event: events.ServiceLost) -> Decision:
    """Waits for the service; what it held of slots is free, what needs it waits too."""
    if event.service in state.lost:
        return Decision(state)
    decision = Decision(replace(state, lost=state.lost | {event.service}))
    if event.service is Service.DRAFTER_TRAINER and state.lease is not None:
        decision = end_lease(decision.state, Cause.PREEMPTED, fence=True)
    if event.service is Service.GATEWAY and state.phase is Phase.ROLLOUT:
        decision = preempt(replace(decision.state, rollout_restart=False))
    return decision._replace(commands=(AwaitService(event.service), *decision.commands))


def service_back(state: State, event: events.ServiceBack) -> Decision:
    """Enters the phase again if its call was the service's; the drafter gets released slots."""
    if event.service not in state.lost:
        return Decision(state)
    state = replace(state, lost=state.lost - {event.service})
    if event.service is Service.DRAFTER_TRAINER and state.phase is Phase.ROLLOUT:
        return lease_released(state)
    called = event.service in CALLED_IN.get(state.phase, ())
    return Decision(state, enters=state.phase if called else None)


def trainer_failed(state: State, event: events.TrainerFailed) -> Decision:
    """The run goes on without the drafter; the policy step begins again."""
    if event.service is Service.DRAFTER_TRAINER:
        return end_lease(state, Cause.PREEMPTED, fence=True)
    if state.phase is not Phase.POLICY:
        raise MachineError(f"TrainerFailed({event.service})", state.describe())
    return try_again(state, Phase.POLICY, f"{event.service}: {event.message}")


def deadline(state: State, event: events.Deadline) -> Decision:
    """Takes the drafter's slots when it was late, fails the run when anybody else was."""
    if event.what == "activation":
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


def try_again(state: State, phase: Phase, message: str) -> Decision:
    """Enters a phase again because of its call's failure, or fails the run after CALL_ATTEMPTS."""
    attempts = state.attempts + 1
    if attempts >= CALL_ATTEMPTS:
        return fail(state, f"{message} (attempt {attempts} of {CALL_ATTEMPTS})")
    return Decision(replace(state, attempts=attempts), enters=phase)


def fail(state: State, message: str) -> Decision:
    """Ends the run for now; Resumed enters the phase again."""
    state = replace(state, failed_phase=state.phase, failure=message)
    return Decision(state, enters=Phase.FAILED)


def give_up(state: State) -> Decision:
    """Takes the drafter's slots back and ends the run."""
    state, commands, _ = preempt(state)
    return Decision(state, (*commands, FinishRun(state.failure)))
