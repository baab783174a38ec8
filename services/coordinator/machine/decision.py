"""What a handler decides, and the answer to an event that comes too late."""

from __future__ import annotations

from typing import NamedTuple

from paceline.services.coordinator.machine.commands import Command, Refuse
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import Phase, State


class Decision(NamedTuple):
    """The state after an event, what is to be done, and the phase that is entered next, if any."""

    state: State
    commands: tuple[Command, ...] = ()
    enters: Phase | None = None


class Objection(NamedTuple):
    """Why an operator does not get what they ask for."""

    message: str
    seen: object
    allowed: str


def refused(state: State, event: Event, seen: int, current: int) -> Decision:
    """Nothing changes."""
    return Decision(state, (Refuse(type(event).__name__, seen, current),))
