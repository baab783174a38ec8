"""Records the use of every slot of a simulation over time; independent of the coordinator's own
account.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.streams.journal import SlotUse


class Interval(NamedTuple):
    """A slot's use from one instant to another."""

    slot: int
    use: SlotUse
    begin_s: float
    end_s: float

    def within(self, begin_s: float, end_s: float) -> float:
        """Seconds of the interval within a window."""
        return max(0.0, min(self.end_s, end_s) - max(self.begin_s, begin_s))


class SlotClock:
    """The uses of a number of slots, idle at first."""

    def __init__(self, slots: int) -> None:
        self._uses = [SlotUse.IDLE] * slots
        self._pushed: frozenset[int] = frozenset()
        self._now = [(SlotUse.IDLE, 0.0)] * slots  # counted use, and its begin
        self.intervals: list[Interval] = []

    def set(self, slots: Iterable[int], use: SlotUse, at_s: float) -> None:
        """Begins another use of the slots."""
        for slot in slots:
            self._uses[slot] = use
            self._note(slot, at_s)

    def push(self, slots: Iterable[int], at_s: float) -> None:
        """Marks slots that push policy weights while they are otherwise idle; no slots: the push
        has ended.
        """
        touched, self._pushed = self._pushed, frozenset(slots)
        for slot in sorted(touched | self._pushed):
            self._note(slot, at_s)

    def close(self, at_s: float) -> None:
        """Ends all open intervals."""
        for slot, (use, since_s) in enumerate(self._now):
            self.intervals.append(Interval(slot, use, since_s, at_s))

    def seconds(self, begin_s: float, end_s: float) -> dict[SlotUse, float]:
        """Slot-seconds by use in a window."""
        found = dict.fromkeys(SlotUse, 0.0)
        for one in self.intervals:
            found[one.use] += one.within(begin_s, end_s)
        return found

    def _note(self, slot: int, at_s: float) -> None:
        use = self._uses[slot]
        if use is SlotUse.IDLE and slot in self._pushed:
            use = SlotUse.TRANSFERRING
        was, since_s = self._now[slot]
        if use is not was:
            if at_s > since_s:
                self.intervals.append(Interval(slot, was, since_s, at_s))
            self._now[slot] = (use, at_s)
