"""Holds the shared parts of simulated services: virtual time, the slots' clock, the way to the
machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.slot_clock import SlotClock
from paceline.services.coordinator.machine.events import Event


class VirtualTime:
    """Runs actions at their virtual times. At the same instant, they run in the order of their
    requests, or by the numbers of `order`.
    """

    def __init__(self, order: Iterator[float] | None = None) -> None:
        """`order`: an iterator with one unique number per request."""
        self.now_s = 0.0
        self._order: Iterator[float] = count() if order is None else order
        self._due: list[tuple[float, float, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Runs an action `seconds` later."""
        heapq.heappush(self._due, (self.now_s + seconds, next(self._order), action))

    def run(self) -> None:
        """Runs all due actions, until none is left."""
        while self._due:
            self.now_s, _, action = heapq.heappop(self._due)
            action()


@dataclass(slots=True)
class Site:
    """The surroundings of one simulated run."""

    fleet: Fleet
    slots: SlotClock
    tell: Callable[[Event], None]  # sends an event to the machine, now
    time: VirtualTime
