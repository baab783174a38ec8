"""Lets callers into the engine in turn, and refuses those who would wait too long.

Keys that wait take turns, one request each; within a key the first comes first. A request that
leaves hands its place straight to the next one, so that nobody who comes later slips in between.
Every operation is O(1), counted over the life of a request. What a key is (a session, a caller) and
what a request does inside is not known here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from paceline.errors import ConfigError, ResourceExhausted
from rollout_gateway import metrics
from rollout_gateway.config import QueueConfig

RETRY_BOUNDS_S = (1.0, 60.0)
"""Shortest and longest advice: below, refused callers would hammer; above, they would miss a queue
that recovered.
"""
TURNS_REMEMBERED = 64


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request that waits.

    The future says True for a place and False for a wait that was too long.
    """

    key: str
    since_s: float
    called: asyncio.Future[bool]


class _Pace:
    """Seconds between two turns while somebody waits; hours without a queue say nothing about the
    next one.
    """

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=TURNS_REMEMBERED)
        self._sum_s = 0.0
        self._last_s = 0.0

    def begin(self, now_s: float) -> None:
        """Somebody waits, nobody did before."""
        self._last_s = now_s

    def turn(self, now_s: float) -> None:
        """A place has changed hands."""
        if len(self._gaps) == TURNS_REMEMBERED:
            self._sum_s -= self._gaps[0]
        self._gaps.append(now_s - self._last_s)
        self._sum_s += now_s - self._last_s
        self._last_s = now_s

    def seconds(self, turns: int, now_s: float) -> float:
        """How long so many turns will take; the time since the last one counts, so that a
        standstill shows.
        """
        return turns * (self._sum_s + now_s - self._last_s) / max(len(self._gaps), 1)


class FairQueue:
    """Places inside the engine. Use on one event loop: `async with queue.place(key)`."""

    def __init__(self, config: QueueConfig, running: int) -> None:
        """`running` requests are inside at once, unless config.running names another number.

        Raises ConfigError.
        """
        self._places = config.running or running
        if self._places < 1:
            raise ConfigError(
                "a queue needs a place to lead to", seen=self._places, allowed="at least 1"
            )
        self._config = config
        self._inside = 0
        self._lines: OrderedDict[str, OrderedDict[_Ticket, None]] = (
            OrderedDict()
        )  # whose turn is next comes first
        self._arrivals: OrderedDict[_Ticket, None] = (
            OrderedDict()
        )  # all who wait; all may wait equally long
        self._alarm: asyncio.TimerHandle | None = (
            None  # for the longest wait; it may ring too early, never too late
        )
        self._pace = _Pace()

    @property
    def running(self) -> int:
        """Requests inside."""
        return self._inside

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._arrivals)

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[float]:
        """A place inside the engine; gives the seconds it was waited for.

        Raises ResourceExhausted with retry_after_s when too many wait, of all keys (reason
        QUEUE_FULL) or of this one (KEY_QUEUE_FULL), and after config.wait_s (QUEUE_WAIT).
        """
        waited_s = await self._enter(key)
        try:
            yield waited_s
        finally:
            self._leave()

    async def _enter(self, key: str) -> float:
        if (
            self._inside < self._places
        ):  # then nobody waits: a place that comes free goes to a waiting request at once
            self._inside += 1
            metrics.QUEUE_RUNNING.record(1)
            metrics.QUEUE_WAIT.record(0)
            return 0.0
        ticket = self._queue(key)
        try:
            granted = await ticket.called
        except asyncio.CancelledError:
            if ticket.called.cancelled():
                self._forget(ticket)
            elif (
                ticket.called.result()
            ):  # called and cancelled in one turn of the loop: the place goes on
                self._leave()
            raise
        waited_s = asyncio.get_running_loop().time() - ticket.since_s
        if not granted:
            wait_s = self._config.wait_s
            raise self._refusal(
                "QUEUE_WAIT", "no place came free in time", f"{waited_s:.1f} s", f"{wait_s:g} s"
            )
        metrics.QUEUE_WAIT.record(waited_s)
        return waited_s

    def _queue(self, key: str) -> _Ticket:
        line = self._lines.get(key)
        if self.waiting >= self._config.limit:
            allowed = self._config.limit
            raise self._refusal(
                "QUEUE_FULL", "too many requests wait for the engine", self.waiting, allowed
            )
        if line is not None and len(line) >= self._config.per_key:
            message = "too many requests of one session wait for the engine"
            raise self._refusal(
                "KEY_QUEUE_FULL", message, len(line), self._config.per_key, len(line)
            )
        loop = asyncio.get_running_loop()
        ticket = _Ticket(key, loop.time(), loop.create_future())
        if not self._arrivals:
            self._pace.begin(ticket.since_s)
        self._lines.setdefault(key, OrderedDict())[ticket] = None
        self._arrivals[ticket] = None
        metrics.QUEUE_WAITING.record(1)
        self._set_alarm()
        return ticket

    def _leave(self) -> None:
        """Hand a place to the next request, or take it back."""
        ticket = self._next()
        if ticket is None:
            self._inside -= 1
            metrics.QUEUE_RUNNING.record(-1)
            return
        self._pace.turn(asyncio.get_running_loop().time())
        ticket.called.set_result(True)

    def _next(self) -> _Ticket | None:
        """Takes out whose turn it is.

        A cancelled one whose task has not run yet costs its key no turn.
        """
        while self._lines:
            key, line = next(iter(self._lines.items()))
            ticket = next(iter(line))
            self._forget(ticket)
            if not ticket.called.cancelled():
                if line:
                    self._lines.move_to_end(key)
                return ticket
        return None

    def _forget(self, ticket: _Ticket) -> None:
        """Out of both orders; a second time changes nothing."""
        if ticket not in self._arrivals:
            return
        del self._arrivals[ticket]
        line = self._lines[ticket.key]
        del line[ticket]
        if not line:
            del self._lines[ticket.key]
        metrics.QUEUE_WAITING.record(-1)

    def _set_alarm(self) -> None:
        if self._alarm is None and self._arrivals:
            due_s = next(iter(self._arrivals)).since_s + self._config.wait_s
            self._alarm = asyncio.get_running_loop().call_at(due_s, self._ring)

    def _ring(self) -> None:
        """Call those who have waited for too long; the alarm was set for one who may have left
        since.
        """
        self._alarm = None
        due_s = asyncio.get_running_loop().time() - self._config.wait_s
        while self._arrivals and (ticket := next(iter(self._arrivals))).since_s <= due_s:
            self._forget(ticket)
            if not ticket.called.cancelled():
                ticket.called.set_result(False)
        self._set_alarm()

    def _refusal(
        self, reason: str, message: str, seen: object, allowed: object, ahead: int | None = None
    ) -> ResourceExhausted:
        """`ahead`: requests of the refused key in line; None where all lines count."""
        metrics.QUEUE_REFUSED.record(reason=reason)
        turns = self.waiting if ahead is None else min(ahead * len(self._lines), self.waiting)
        shortest_s, longest_s = RETRY_BOUNDS_S
        estimate_s = self._pace.seconds(turns, asyncio.get_running_loop().time())
        retry_after_s = min(max(estimate_s, shortest_s), longest_s)
        return ResourceExhausted(
            message, reason=reason, seen=seen, allowed=allowed, retry_after_s=retry_after_s
        )
