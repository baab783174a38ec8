"""Lets callers into the engine in turn, and refuses callers that would wait too long.

Waiting keys take turns, one request each; within a key the order is first in, first out. A leaving
request passes its place directly to the next request, so that a later request cannot slip in
between. Every operation is O(1), amortised over the life of a request. The queue gives no meaning
to keys (a session, a caller) or to requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.errors import ConfigError, ResourceExhausted
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.config import QueueConfig

RETRY_BOUNDS_S = (1.0, 60.0)
"""Bounds of the retry advice, in seconds. Shorter advice would make refused callers hammer; longer
advice would make them miss a queue that recovered.
"""
TURNS_REMEMBERED = 64


class _Pace:
    """Mean seconds between two turns while requests wait. Time without a queue does not count."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=TURNS_REMEMBERED)
        self._sum_s = 0.0
        self._last_s = 0.0

    def begin(self, now_s: float) -> None:
        """Start timing: the first request begins to wait."""
        self._last_s = now_s

    def turn(self, now_s: float) -> None:
        """Record that a place has changed hands."""
        if len(self._gaps) == TURNS_REMEMBERED:
            self._sum_s -= self._gaps[0]
        self._gaps.append(now_s - self._last_s)
        self._sum_s += now_s - self._last_s
        self._last_s = now_s

    def seconds(self, turns: int, now_s: float) -> float:
        """Expected seconds of `turns` turns. The time since the last turn counts, so that a
        standstill shows.
        """
        return turns * (self._sum_s + now_s - self._last_s) / max(len(self._gaps), 1)


class FairQueue:
    """Places inside the engine. Use on one event loop: `async with queue.place(key)`."""

    def __init__(self, config: QueueConfig, running: int) -> None:
        """Allow `running` requests inside at once, unless config.running sets another number.
        Raises ConfigError below 1.
        """
        self._config = config
        self._inside = 0
        # By key, the next key first. A future is done once its request has a place.
        self._lines: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()
        self._waiting = 0
        self._pace = _Pace()
        self._places = self._config.running or running
        if self._places < 1:
            raise ConfigError(
                "a queue needs a place to lead to", seen=self._places, allowed="at least 1"
            )

    @property
    def running(self) -> int:
        """Requests inside the engine."""
        return self._inside

    @property
    def waiting(self) -> int:
        """Waiting requests."""
        return self._waiting

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[float]:
        """Hold a place inside the engine; yields the seconds of the wait.

        Raises ResourceExhausted with retry_after_s when too many requests wait in all (reason
        QUEUE_FULL) or under this key (KEY_QUEUE_FULL), and after config.wait_s (QUEUE_WAIT).
        """
        waited_s = await self._enter(key)
        try:
            yield waited_s
        finally:
            self._leave()

    async def _enter(self, key: str) -> float:
        # A free place means that no request waits, because `_leave` passes places on directly.
        if self._inside < self._places:
            self._inside += 1
            metrics.QUEUE_RUNNING.record(1)
            metrics.QUEUE_WAIT.record(0)
            return 0.0

        self._check_room(key)
        loop, wait_s = asyncio.get_running_loop(), self._config.wait_s
        since_s, called = loop.time(), loop.create_future()
        if not self._waiting:
            self._pace.begin(since_s)
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
        return loop.time() - since_s

    def _check_room(self, key: str) -> None:
        """Raises ResourceExhausted when too many requests wait."""
        limit, line = self._config.limit, len(self._lines.get(key, ()))
        if self._waiting >= limit:
            raise self._refusal(
                "QUEUE_FULL", "too many requests wait for the engine", self._waiting, limit
            )
        if line >= self._config.per_key:
            message = "too many requests of one session wait for the engine"
            raise self._refusal("KEY_QUEUE_FULL", message, line, self._config.per_key, line)

    def _leave(self) -> None:
        """Pass a place to the next request, or free it.

        A request that was cancelled before its task ran costs its key no turn.
        """
        while self._lines and self._inside <= self._places:
            key, line = next(iter(self._lines.items()))
            called = next(iter(line))
            self._forget(key, called)
            if not called.cancelled():
                if line:
                    self._lines.move_to_end(key)
                self._pace.turn(asyncio.get_running_loop().time())
                called.set_result(None)
                return
        self._inside -= 1
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
        self._waiting += count
        metrics.QUEUE_WAITING.record(count)

    def _refusal(
        self, reason: str, message: str, seen: object, allowed: object, ahead: int | None = None
    ) -> ResourceExhausted:
        """`ahead`: waiting requests of the refused key; None when all lines count."""
        metrics.QUEUE_REFUSED.record(reason=reason)
        turns = self.waiting if ahead is None else min(ahead * len(self._lines), self.waiting)
        shortest_s, longest_s = RETRY_BOUNDS_S
        estimate_s = self._pace.seconds(turns, asyncio.get_running_loop().time())
        retry_after_s = min(max(estimate_s, shortest_s), longest_s)
        return ResourceExhausted(
            message, reason=reason, seen=seen, allowed=allowed, retry_after_s=retry_after_s
        )
