"""Quarantines generation paths that produce inexact log-probs; the run continues without them."""

from __future__ import annotations

from dataclasses import replace

from paceline.services.coordinator.machine.commands import Quarantine
from paceline.services.coordinator.machine.decision import Decision
from paceline.services.coordinator.machine.events import PathsBeyondBound
from paceline.services.coordinator.machine.state import State
from paceline.trajectory import NUMBERS_PATH


def quarantined(state: State, event: PathsBeyondBound) -> Decision:
    """Adds the paths to the quarantine in order of discovery; quarantined paths change nothing. The
    next policy drops an inexact profile.
    """
    new = tuple(dict.fromkeys(path for path in event.paths if path not in state.quarantined))
    if not new:
        return Decision(state)
    profile = None if NUMBERS_PATH + (state.profile or "") in new else state.profile
    state = replace(state, quarantined=state.quarantined + new, profile=profile)
    return Decision(state, (Quarantine(state.step, event.epoch, state.quarantined),))
