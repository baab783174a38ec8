"""Keeps an operator's choices: the pause of the run and the serving drafter.

A paused run rests when the present step has ended. A chosen drafter serves with the next commit,
while drafters promoted by the gate wait.
"""

from dataclasses import replace

from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.commands import Decision, Objection
from paceline.services.coordinator.machine.state import DrafterPin, Phase, State
from paceline.trajectory import NUMBERS_PATH

Choice = events.Paused | events.Continued | events.DrafterChosen | events.DrafterUnpinned


def objection(state: State, event: Choice) -> Objection | None:
    """The objection to a choice in the present state; None without one."""
    match event:
        case events.Paused():
            return _against_pause(state)
        case events.DrafterChosen() if not _commits_follow(state):
            return Objection("no commit follows in this run", state.doing, "a step that is to end")
        case events.DrafterChosen():
            return _against_drafter(state, event)
    return None


def _against_pause(state: State) -> Objection | None:
    begun, steps = state.rollouts.begun, state.settings.total_steps
    if begun < steps:
        return None
    seen = f"{begun} of {steps} steps have begun, {state.doing}"
    return Objection(
        "no step is left for a pause to hold back", seen, "a run with steps that have not begun"
    )


def _against_drafter(state: State, event: events.DrafterChosen) -> Objection | None:
    serving, previous = state.versions.drafter, state.previous_drafter
    if state.pin is not None and state.pin.lasting and not event.lasting:
        return Objection("a drafter is pinned", f"d{state.pin.version}", "unpin it first")
    if state.committing is not None and state.committing.drafter != serving:
        return Objection(
            "another drafter is being committed",
            f"d{state.committing.drafter}",
            "ask again when it serves",
        )
    if event.version is None and not event.lasting and previous is None and state.pin is None:
        return Objection(
            "there is no drafter to go back to",
            "none served before, or it has been gone back to",
            "after a promotion has been committed",
        )
    if event.version not in (None, serving, previous):
        kept = [serving] if previous is None else [serving, previous]
        allowed = " or ".join(f"d{version}" for version in kept)
        return Objection("no such drafter version is kept", f"d{event.version}", allowed)
    return None


def paused(state: State, event: events.Paused | events.Continued) -> Decision:
    """Stops the draw of tasks, or allows it again."""
    return Decision(replace(state, paused=isinstance(event, events.Paused)))


def drafter_chosen(state: State, event: events.DrafterChosen) -> Decision:
    """Selects the serving or the former drafter; without a version, a pending rollback keeps its
    version.
    """
    if (version := event.version) is None and not event.lasting:
        version = state.pin.version if state.pin is not None else state.previous_drafter
    version = state.versions.drafter if version is None else version
    done = version == state.versions.drafter and not event.lasting
    pin = None if done else DrafterPin(version, event.lasting)
    return Decision(replace(state, pin=pin, rollback=False))


def drafter_unpinned(state: State, event: events.DrafterUnpinned) -> Decision:
    """Lets drafters promoted meanwhile serve from the next commit, and withdraws a pending
    rollback.
    """
    return Decision(replace(state, pin=None))


def due_profile(state: State) -> str:
    """The profile of the next policy: the serving one. A profile that the audit found inexact is
    dropped if the engine can serve without it.
    """
    serving = state.versions.profile
    inexact = NUMBERS_PATH + serving in state.quarantined
    return "" if inexact and not state.settings.profile_stays else serving


def due_drafter(state: State) -> int:
    """The drafter that must serve before the next policy does."""
    if state.pin is not None:
        return state.pin.version
    if state.rollback and state.promoted is None and state.previous_drafter is not None:
        return state.previous_drafter
    return state.versions.drafter


def _commits_follow(state: State) -> bool:
    steps_left = state.settings.total_steps - state.step
    if state.learner.phase is Phase.COMMIT:
        steps_left -= 1
    return state.phase in (Phase.RUNNING, Phase.PAUSED, Phase.EVALUATE) and steps_left > 0
