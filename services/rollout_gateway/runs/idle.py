"""Releases workers that open traffic leaves idle."""

from __future__ import annotations

import asyncio
from collections import deque

from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.workers.router import Router


class IdleWorkers:
    """Inside the block, a worker without a request for `after_s` seconds is released and reported
    once. A worker that another step has released is reported too.

    The last serving worker is never released. At the start, released workers get requests again
    unless a trainer holds them.
    """

    def __init__(self, router: Router, after_s: float) -> None:
        self._router = router
        self._after_s = after_s
        self._lent: deque[int] = deque()
        self._news = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> IdleWorkers:
        self._router.loans.keep_spare()
        self._watchers = [
            background(self._watch(seat.index), f"idle worker {seat.index}")
            for seat in self._router.seats
        ]
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel(*self._watchers)

    async def lent(self) -> None:
        """Return once `pop` has a worker."""
        while not self._lent:
            self._news.clear()
            await self._news.wait()

    def pop(self) -> int | None:
        """The next released worker; None when there is none now."""
        return self._lent.popleft() if self._lent else None

    async def _watch(self, index: int) -> None:
        # idle time before the block does not count
        await asyncio.sleep(self._after_s)
        await self._router.idle_for(index, self._after_s)
        seats = self._router.seats
        serving = [seat for seat in seats if not seat.released]
        if seats[index].released or len(serving) > 1:
            if not seats[index].released:
                self._router.loans.spare(index)
            self._lent.append(index)
            self._news.set()
