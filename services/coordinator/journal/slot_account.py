"""Counts for each step what its slots were used for, from the transitions alone."""

from __future__ import annotations

from enum import StrEnum

from coordinator.machine.events import DrafterActivated, Event
from coordinator.machine.state import Holder, Phase, State


class Use(StrEnum):
    """What a slot-second went into; each one into one of these."""

    GENERATING = "generating"
    POLICY = "policy"
    DRAFTER = "drafter"
    TRANSFERRING = "transferring"  # weights on their way, and the drafter's onto its slots
    IDLE = "idle"


class SlotAccount:
    """Slot-seconds since the last `open`."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._attached = 0  # epoch of the lease under which the drafter trains
        self._seconds = dict.fromkeys(Use, 0.0)

    def open(self) -> None:
        """A step begins: nothing is counted yet."""
        self._seconds = dict.fromkeys(Use, 0.0)

    def observe(self, before: State, event: Event, after: State) -> None:
        """Takes one transition in: until now the slots were what they were before it."""
        for holder in Holder:
            held_s = before.slots.counted(holder) * (event.at_s - self._last_s)
            self._seconds[self._use(holder, before)] += held_s
        self._last_s = event.at_s
        if isinstance(event, DrafterActivated):
            self._attached = max(self._attached, event.epoch)

    def seconds(self) -> dict[str, float]:
        """By use, all of them."""
        return {use.value: seconds for use, seconds in self._seconds.items()}

    def _use(self, holder: Holder, state: State) -> Use:
        match holder:
            case Holder.ENGINE:
                return Use.GENERATING
            case Holder.POLICY:
                return Use.POLICY
            case Holder.DRAFTER:
                attached = state.lease is not None and state.lease.epoch == self._attached
                return Use.DRAFTER if attached else Use.TRANSFERRING
            case Holder.NONE:
                pushed = state.phase in (Phase.POLICY, Phase.COMMIT)
                return Use.TRANSFERRING if pushed else Use.IDLE
