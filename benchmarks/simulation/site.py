"""Holds what simulated services share: virtual time, the slots' clock, the way to the machine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.slot_clock import SlotClock
from paceline.services.coordinator.machine.events import Event


class VirtualTime:
    """Does things at their time, those of the same instant in the order in which they were asked
    for, or in that of other numbers.
    """

    def __init__(self, order: Iterator[float] | None = None) -> None:
        """`order`: of what is asked for, each number once."""
        self.now_s = 0.0
        self._order: Iterator[float] = count() if order is None else order
        self._due: list[tuple[float, float, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does it that much later."""
        heapq.heappush(self._due, (self.now_s + seconds, next(self._order), action))

    def run(self) -> None:
        """Goes on until nothing is due."""
        while self._due:
            self.now_s, _, action = heapq.heappop(self._due)
            action()


@dataclass(slots=True)
class Site:
    """One simulated run's surroundings."""

    fleet: Fleet
    slots: SlotClock
    tell: Callable[[Event], None]  # an event, to the machine, now
    time: VirtualTime
