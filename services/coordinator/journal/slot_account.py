"""Counts for each step what its slots were used for, from the transitions alone."""

from __future__ import annotations

from coordinator.machine.events import DrafterActivated, Event
from coordinator.machine.state import Holder, Phase, State
from paceline.streams.journal_line import SlotUse


class SlotAccount:
    """Slot-seconds since the last `open`."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._attached = 0  # epoch of the lease under which the drafter trains
        self._seconds = dict.fromkeys(SlotUse, 0.0)

    def open(self) -> None:
        """A step begins: nothing is counted yet."""
        self._seconds = dict.fromkeys(SlotUse, 0.0)

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

    def _use(self, holder: Holder, state: State) -> SlotUse:
        match holder:
            case Holder.ENGINE:
                return SlotUse.GENERATING
            case Holder.POLICY:
                return SlotUse.POLICY
            case Holder.DRAFTER:
                attached = state.lease is not None and state.lease.epoch == self._attached
                return SlotUse.DRAFTER if attached else SlotUse.TRANSFERRING
            case Holder.NONE:
                pushed = state.phase in (Phase.POLICY, Phase.COMMIT)
                return SlotUse.TRANSFERRING if pushed else SlotUse.IDLE
