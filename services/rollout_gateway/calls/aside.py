"""Works on large requests in threads beside the event loop, one of a size at a time.

What a request costs before it is planned grows with its bytes: reading its JSON, its template, its
tokens, its hashes. Small ones are worked on where they stand. The others wait for one of two
threads, so that those of some kilobytes do not wait for megabytes, and the loop shares Python's
lock with two threads at most. What a thread does cannot be interrupted: sizes are bounded before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paceline.errors import ResourceExhausted
from paceline.services.rollout_gateway import metrics

SMALL_BYTES = 4 << 10
"""Of a request that costs the loop a few milliseconds at most."""
LARGE_BYTES = 256 << 10
"""Above it a request waits for the thread of the large ones."""
MAX_HELD_BYTES = 128 << 20
"""Of the large requests that are being received, wait or are worked on; more are refused."""
WAIT_S = 60.0
"""Seconds after which a large request that waits is refused."""

T = TypeVar("T")


class LargeRequests:
    """The threads of one gateway, and what they have to do."""

    def __init__(self, *, most_bytes: int = MAX_HELD_BYTES, wait_s: float = WAIT_S) -> None:
        self._most_bytes = most_bytes
        self._wait_s = wait_s
        self._held_bytes = 0
        self._medium = ThreadPoolExecutor(1, "medium-request")
        self._large = ThreadPoolExecutor(1, "large-request")

    def hold(self, size: int) -> None:
        """Count bytes of a large request. Raises ResourceExhausted when there are too many."""
        if self._held_bytes + size > self._most_bytes:
            raise self._refusal(
                "too many bytes of large requests wait",
                f"{self._held_bytes + size} bytes",
                f"{self._most_bytes} bytes",
            )
        self._held_bytes += size

    def free(self, size: int) -> None:
        """The bytes are gone."""
        self._held_bytes -= size

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises; `size`: bytes of the request that it is for.

        Raises ResourceExhausted when too much waits, or for too long.
        """
        if size <= SMALL_BYTES:
            return work()
        thread = self._medium if size <= LARGE_BYTES else self._large
        self.hold(size)
        try:
            async with asyncio.timeout(self._wait_s) as limit:
                return await asyncio.get_running_loop().run_in_executor(thread, work)
        except TimeoutError:
            if not limit.expired():
                raise
            waited = f"{self._wait_s:g} s"
            raise self._refusal("a large request waited too long", waited, waited) from None
        finally:
            self.free(size)

    def stop(self) -> None:
        """Let go of the threads; what waits for them is forgotten."""
        for thread in (self._medium, self._large):
            thread.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _refusal(message: str, seen: str, allowed: str) -> ResourceExhausted:
        metrics.QUEUE_REFUSED.record(reason="LARGE_REQUESTS")
        return ResourceExhausted(message, reason="LARGE_REQUESTS", seen=seen, allowed=allowed)
