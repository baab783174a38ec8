"""Circuit breaker: after failures in a row it stops requests for a while, then lets a single probe
through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.errors import Unavailable


class CircuitBreaker:
    """Closed: all requests pass.

    Open: no request passes for `open_s` seconds, then a single probe; a successful probe closes the
    circuit.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit = failures
        self._open_s = open_s
        self._failures = 0  # in a row
        self._openings = 0
        self._open_until = 0.0
        self._probing = False
        self._changed = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether callers wait."""
        return self._failures >= self._limit

    @asynccontextmanager
    async def request(self, until: float) -> AsyncIterator[None]:
        """Surround one request. An exception in the block counts as a failure; a cancelled block
        counts as neither.

        Waits while the circuit is open. Raises Unavailable at once when it stays open until
        `until`, in the event loop's time.
        """
        probe = await self._enter(until)
        openings = self._openings
        failed: bool | None = None
        try:
            yield
            failed = False
        except Exception:
            failed = True
            raise
        finally:
            self._leave(probe, failed, late=openings != self._openings)

    async def _enter(self, until: float) -> bool:
        """Whether the caller is the single probe of an open circuit."""
        clock = asyncio.get_running_loop().time
        while self.open:
            if not self._probing and clock() >= self._open_until:
                self._probing = True
                return True
            wake = until if self._probing else self._open_until
            if clock() >= until or (wake >= until and not self._probing):
                seen = f"{self._failures} failures in a row"
                raise Unavailable(
                    "nobody asks the reward at a URL for a while", reason="CIRCUIT_OPEN", seen=seen
                )
            try:
                async with asyncio.timeout_at(wake):
                    await self._changed.wait()
            except TimeoutError:
                continue

        return False

    def _leave(self, probe: bool, failed: bool | None, late: bool) -> None:
        if failed is False:
            self._failures = 0
        # A request that began before the circuit opened does not count as a new failure.
        elif failed and not late:
            self._failures += 1
            if self.open:
                self._openings += 1
                self._open_until = asyncio.get_running_loop().time() + self._open_s
        if probe:
            self._probing = False
        self._changed.set()
        self._changed = asyncio.Event()
