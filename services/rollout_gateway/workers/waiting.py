"""Notices that callers' requests wait because workers are lent, and notifies the listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from paceline.services.rollout_gateway.workers.held import HeldRequests
from paceline.services.rollout_gateway.workers.placement import Seat


@dataclass(frozen=True, slots=True)
class Waiting:
    """A report that requests wait for lent workers."""

    requests: int
    workers: tuple[int, ...]  # lent or released workers


class WaitingTraffic:
    """Notifies its listeners once when requests have waited for `after_s` seconds in a row, and
    again only after a time without waiting. For use on one event loop.

    A request waits when no worker may take it, or when its worker has more requests than it decodes
    at once. Samples that a step has assigned to a worker do not count, because no other worker may
    run them.
    """

    def __init__(
        self, seats: Sequence[Seat], held: HeldRequests, at_once: int, after_s: float
    ) -> None:
        """`at_once`: requests that a worker decodes at once."""
        self._seats, self._held, self._at_once, self._after_s = seats, held, at_once, after_s
        self._timer: asyncio.TimerHandle | None = None
        self._now: Waiting | None = None  # the current report
        self._listeners: set[asyncio.Queue[Waiting | None]] = set()

    def look(self) -> None:
        """Update after a change of requests."""
        if not self._somebody_waits():
            self._now = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None and self._now is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._after_s, self._tell)

    async def news(self) -> AsyncGenerator[Waiting]:
        """Yield the current report if it still holds, then every new report until `stop`."""
        told: asyncio.Queue[Waiting | None] = asyncio.Queue()
        if self._now is not None:
            told.put_nowait(self._now)
        self._listeners.add(told)
        try:
            while (one := await told.get()) is not None:
                yield one
        finally:
            self._listeners.discard(told)

    def stop(self) -> None:
        """End all `news`."""
        for listener in self._listeners:
            listener.put_nowait(None)
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        self._timer = None
        if not self._somebody_waits():  # workers may return without a notice
            return
        released = tuple(seat.index for seat in self._seats if seat.released)
        self._now = Waiting(self._waiting(), released)
        for listener in self._listeners:
            listener.put_nowait(self._now)

    def _somebody_waits(self) -> bool:
        return any(seat.released for seat in self._seats) and self._waiting() > 0

    def _waiting(self) -> int:
        waiting = len(self._held)
        for seat in self._seats:
            over = len(seat.live) - self._at_once
            if over > 0 and not seat.released:
                waiting += min(over, sum(one.pinned is None for one in seat.live.values()))
        return waiting
