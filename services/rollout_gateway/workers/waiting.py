"""Notices that requests of callers wait because workers are lent out, and tells whoever listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from paceline.services.rollout_gateway.workers.held import HeldRequests
from paceline.services.rollout_gateway.workers.placement import Seat


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests wait that a lent worker could answer."""

    requests: int
    workers: tuple[int, ...]  # that are lent out, or released


class WaitingTraffic:
    """Told of every change of requests, it tells once when somebody waits for `after_s` seconds on
    end, and again only after nobody waited. For use on one event loop.

    A request waits where no worker may take it, and where its worker has more than it decodes at
    once. Samples that a step has given to a worker do not count: no other may run them.
    """

    def __init__(
        self, seats: Sequence[Seat], held: HeldRequests, at_once: int, after_s: float
    ) -> None:
        """`at_once`: requests that a worker decodes at once."""
        self._seats, self._held, self._at_once, self._after_s = seats, held, at_once, after_s
        self._timer: asyncio.TimerHandle | None = None
        self._now: Waiting | None = None  # as it was told
        self._listeners: set[asyncio.Queue[Waiting | None]] = set()

    def look(self) -> None:
        """Requests have come, moved or ended."""
        if not self._somebody_waits():
            self._now = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None and self._now is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._after_s, self._tell)

    async def news(self) -> AsyncGenerator[Waiting]:
        """What was told and still holds, then what is told, until `stop`."""
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
        """Ends all `news`."""
        for listener in self._listeners:
            listener.put_nowait(None)
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        self._timer = None
        if not self._somebody_waits():  # workers are back, of which nobody tells
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
