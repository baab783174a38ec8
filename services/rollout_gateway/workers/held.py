"""Holds requests while every worker that may answer them is lent."""

from __future__ import annotations

import asyncio

from paceline.errors import Unavailable
from paceline.services.rollout_gateway.workers.generation import Generation


class HeldRequests:
    """Holds each request for at most `wait_s` seconds, then ends it as Unavailable.

    Pinned requests, the samples of a RunTasks call, wait for their worker without this limit, since
    the call has its own deadline. For use on one event loop.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._held: dict[int, tuple[Generation, asyncio.TimerHandle | None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, generation: Generation) -> None:
        """Hold a request until it is taken."""
        timer = None
        if generation.pinned is None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._wait_s, self._late, generation)
        self._held[generation.request.request_id] = generation, timer

    def take(self, generation: Generation) -> bool:
        """Remove the request; returns whether it was held."""
        found = self._held.pop(generation.request.request_id, None)
        if found is not None and found[1] is not None:
            found[1].cancel()
        return found is not None

    def take_all(self) -> list[Generation]:
        """Remove all held requests, oldest first."""
        return [one for one, _ in list(self._held.values()) if self.take(one)]

    def _late(self, generation: Generation) -> None:
        self.take(generation)
        message = f"the engine's slots are lent to a trainer; waited {self._wait_s:g} s"
        generation.fail(f"{message} (gateway.queue.wait_s)", Unavailable)
