"""The decision of a handler, and the answer to a late event."""

from __future__ import annotations

from typing import NamedTuple

from paceline.services.coordinator.machine.commands import Command, Refuse
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import Phase, State


class Decision(NamedTuple):
    """The state after an event, the commands, and the phase to enter next, if any."""

    state: State
    commands: tuple[Command, ...] = ()
    enters: Phase | None = None


class Objection(NamedTuple):
    """The reason for refusing an operator's request."""

    message: str
    seen: object
    allowed: str


def refused(state: State, event: Event, seen: int, current: int) -> Decision:
    """Refuses an event without a change."""
    return Decision(state, (Refuse(type(event).__name__, seen, current),))
