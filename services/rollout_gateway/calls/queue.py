"""Lets callers into the engine in turn, and refuses callers that would wait too long.

Waiting keys take turns, one request each; within a key the order is first in, first out. A leaving
request passes its place directly to the next request, so that a later request cannot slip in
between. Every operation is O(1), amortised over the life of a request. The queue gives no meaning
to keys (a session, a caller) or to requests.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.errors import ResourceExhausted
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.config import QueueConfig

RETRY_BOUNDS_S = (1.0, 60.0)
"""Bounds of the retry advice, in seconds. Shorter advice would make refused callers hammer; longer
advice would make them miss a queue that recovered.
"""
TURNS_REMEMBERED = 64


class FairQueue:
    """Places inside the engine. Use on one event loop: `async with queue.place(key)`."""

    def __init__(self, config: QueueConfig, running: int) -> None:
        """Allow `running` requests, at least one, inside at once, unless config.running sets
        another number.
        """
        self._config = config
        self.running = 0
        """Requests inside the engine."""
        # By key, the next key first. A future is done once its request has a place.
        self._lines: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()
        self.waiting = 0
        """Waiting requests."""
        # Times of the last turns, as if requests had always waited since the first of them.
        self._turns: deque[float] = deque(maxlen=TURNS_REMEMBERED + 1)
        self._places = config.running or running

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """Hold a place inside the engine.

        Raises ResourceExhausted with retry_after_s when too many requests wait in all (reason
        QUEUE_FULL) or under this key (KEY_QUEUE_FULL), and after config.wait_s (QUEUE_WAIT).
        """
        await self._enter(key)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, key: str) -> None:
        # A free place means that no request waits, because `_leave` passes places on directly.
        if self.running < self._places:
            self.running += 1
            metrics.QUEUE_RUNNING.record(1)
            metrics.QUEUE_WAIT.record(0)
            return

        self._check_room(key)
        loop, wait_s = asyncio.get_running_loop(), self._config.wait_s
        since_s, called = loop.time(), loop.create_future()
        if not self.waiting:
            idle_s = since_s - self._turns[-1] if self._turns else 0.0
            shifted = [one + idle_s for one in self._turns] or [since_s]
            self._turns = deque(shifted, self._turns.maxlen)
        self._lines.setdefault(key, OrderedDict())[called] = None
        self._waits_more(1)
        try:
            async with asyncio.timeout(wait_s):
                await called
        except (TimeoutError, asyncio.CancelledError) as error:
            self._forget(key, called)
            if not called.cancelled():  # called in the same turn of the loop: pass the place on
                self._leave()
            if isinstance(error, TimeoutError):
                waited = f"{loop.time() - since_s:.1f} s"
                message = "no place came free in time"
                raise self._refusal("QUEUE_WAIT", message, waited, f"{wait_s:g} s") from None
            raise

        metrics.QUEUE_WAIT.record(loop.time() - since_s)

    def _check_room(self, key: str) -> None:
        """Raises ResourceExhausted when too many requests wait."""
        limit, line = self._config.limit, len(self._lines.get(key, ()))
        if self.waiting >= limit:
            message = "too many requests wait for the engine"
            raise self._refusal("QUEUE_FULL", message, self.waiting, limit)
        if line >= self._config.per_key:
            message = "too many requests of one session wait for the engine"
            raise self._refusal("KEY_QUEUE_FULL", message, line, self._config.per_key, line)

    def _leave(self) -> None:
        """Pass a place to the next request, or free it.

        A request that was cancelled before its task ran costs its key no turn.
        """
        while self._lines and self.running <= self._places:
            key, line = next(iter(self._lines.items()))
            called = next(iter(line))
            self._forget(key, called)
            if not called.cancelled():
                if line:
                    self._lines.move_to_end(key)
                self._turns.append(asyncio.get_running_loop().time())
                called.set_result(None)
                return
        self.running -= 1
        metrics.QUEUE_RUNNING.record(-1)

    def _forget(self, key: str, called: asyncio.Future[None]) -> None:
        """Remove a request from its line; a second call changes nothing."""
        line = self._lines.get(key, OrderedDict())
        if called not in line:
            return
        del line[called]
        if not line:
            del self._lines[key]
        self._waits_more(-1)

    def _waits_more(self, count: int) -> None:
        self.waiting += count
        metrics.QUEUE_WAITING.record(count)

    def _refusal(
        self, reason: str, message: str, seen: object, allowed: object, ahead: int | None = None
    ) -> ResourceExhausted:
        """`ahead`: waiting requests of the refused key; None when all lines count."""
        metrics.QUEUE_REFUSED.record(reason=reason)
        turns = self.waiting if ahead is None else min(ahead * len(self._lines), self.waiting)
        shortest_s, longest_s = RETRY_BOUNDS_S
        # The time since the last turn counts, so that a standstill shows.
        passed_s = asyncio.get_running_loop().time() - self._turns[0]
        mean_s = passed_s / max(len(self._turns) - 1, 1)
        error = ResourceExhausted(message, reason=reason, seen=seen, allowed=allowed)
        error.retry_after_s = min(max(turns * mean_s, shortest_s), longest_s)
        return error
