"""Selects the worker of a request, tracks idle time and notices waiting callers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from paceline.errors import Unavailable
from paceline.rpc.progress import Activity
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.telemetry import names, past_span
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb

STICKY_FACTOR = 2.0
STICKY_SLACK = 4
"""The worker with a session's KV cache keeps the session up to FACTOR times the other workers' mean
load plus SLACK.

A move costs a prefill of the whole conversation. Staying costs a share of larger decode rounds, and
their seconds grow far slower than their rows. So twice the load is still the better place, and a
few requests on an idle machine are no load. Above that limit requests would queue there while other
workers have room.
"""


@dataclass(eq=False)
class Seat:
    """A worker's place; its process changes with restarts."""

    index: int
    process: WorkerProcess | None = None  # None while it starts
    first: int = 0  # number of this gateway's first worker within the run
    released: bool = False  # lent out, or about to be: gets no requests
    spare: bool = False  # released because it was idle; no trainer has taken it yet
    lent: bool = False  # the process has released its memory, or does so at its start
    unsent: list[Generation] = field(default_factory=list)
    live: dict[int, Generation] = field(default_factory=dict)  # changed only by the methods below
    # reason by request, for requests that continue from their tokens once the engine has ended them
    moving: dict[int, str] = field(default_factory=dict)
    # chunks of a worker with weights on trial; None: chunks are delivered at once
    withheld: list[pb.TokenChunk] | None = None
    idle_since_s: float | None = field(default_factory=time.monotonic)
    """time.monotonic() at the end of its last request; None while a request runs."""
    _busy_since_ns: int = 0
    activity: Activity = field(init=False)
    # of idle and busy; replaced when it is set
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.activity = Activity(f"worker {self.index}")

    @property
    def number(self) -> int:
        """Number of the worker within the run, as spans show it."""
        return self.first + self.index

    def add(self, generation: Generation) -> None:
        """Queue a request here."""
        generation.worker_index = self.index
        self.live[generation.request.request_id] = generation
        self.unsent.append(generation)
        if self.idle_since_s is not None:
            self.idle_since_s, self._busy_since_ns = None, time.time_ns()
            self.activity.begins("decodes")
            self._wake()

    def end(self, request_id: int) -> None:
        """A request of this place has ended."""
        del self.live[request_id]
        self._rest()

    def take_unsent(self) -> list[Generation]:
        """Remove the unsent requests and return them."""
        waiting, self.unsent = self.unsent, []
        for generation in waiting:
            del self.live[generation.request.request_id]
        self._rest()
        return waiting

    def suspend(self, reason: str) -> list[int]:
        """Mark the sent requests as moving, and return their ids. When the engine ends them they
        continue from their tokens.
        """
        unsent = {generation.request.request_id for generation in self.unsent}
        sent = sorted(self.live.keys() - unsent)
        self.moving.update(dict.fromkeys(sent, reason))
        return sent

    def clear(self) -> tuple[list[Generation], list[Generation]]:
        """Remove all requests; returns the sent and the unsent requests."""
        unsent = {id(generation) for generation in self.unsent}
        sent = [generation for generation in self.live.values() if id(generation) not in unsent]
        waiting, self.unsent, self.live = self.unsent, [], {}
        self.moving.clear()
        self.withheld = None
        self._rest()
        return sent, waiting

    async def idle_for(self, seconds: float) -> None:
        """Return once the place has been idle for so many seconds in a row.

        Sleeps between changes; does not poll.
        """
        while True:
            left_s = None
            if self.idle_since_s is not None:
                left_s = self.idle_since_s + seconds - time.monotonic()
                if left_s <= 0:
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._change.wait()

    async def idle_within(self, seconds: float) -> bool:
        """Whether all requests here have ended within the seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle_for(0)
        return self.idle_since_s is not None

    def _rest(self) -> None:
        if not self.live and self.idle_since_s is None:
            self.idle_since_s = time.monotonic()
            self.activity.begins("")
            past_span(names.ENGINE_BUSY, {names.WORKER: self.number}, self._busy_since_ns)
            self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def choose(seats: Sequence[Seat], prefer: int | None) -> Seat | None:
    """Choose the place of a request without a fixed worker. `prefer`, the worker with its prefix in
    cache, wins unless overloaded; else the least loaded place. None while all are released.

    Places without a process only count when there is no other.
    """
    there = [seat for seat in seats if not seat.released]
    kept = [seat for seat in there if seat.process is not None] or there
    held = next((seat for seat in kept if seat.index == prefer), None)
    if held is not None:
        others = [len(seat.live) for seat in kept if seat is not held]
        mean = sum(others) / max(len(others), 1)
        if not others or len(held.live) <= STICKY_FACTOR * mean + STICKY_SLACK:
            return held
    return min(kept, key=lambda seat: len(seat.live), default=None)


class WaitingRequests:
    """Holds the requests that no worker may take, and reports requests that wait for lent workers.

    A held request ends as Unavailable after `wait_s` seconds. Pinned requests, the samples of a
    RunTasks call, wait for their worker without this limit, since the call has its own deadline.

    Reports once when requests have waited for `after_s` seconds in a row, and again only after a
    time without waiting. A request waits when it is held, or when its worker has more requests than
    it decodes at once. Samples that a step has assigned to a worker do not count there, because no
    other worker may run them. For use on one event loop.
    """

    def __init__(self, seats: Sequence[Seat], wait_s: float, at_once: int, after_s: float) -> None:
        """`at_once`: requests that a worker decodes at once."""
        self._seats, self._wait_s, self._at_once, self._after_s = seats, wait_s, at_once, after_s
        self._held: dict[int, tuple[Generation, asyncio.TimerHandle | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._now: rpb.WatchTrafficResponse | None = None  # the current report
        self._change = asyncio.Event()  # of the report; replaced when it is set
        self._stopped = False

    def hold(self, generation: Generation) -> None:
        """Hold a request until it is removed."""
        timer = None
        if generation.pinned is None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._wait_s, self._refuse, generation)
        self._held[generation.request.request_id] = generation, timer
        self.update()

    def remove(self, generation: Generation) -> bool:
        """Stop holding the request; returns whether it was held."""
        found = self._held.pop(generation.request.request_id, None)
        if found is not None and found[1] is not None:
            found[1].cancel()
        return found is not None

    def remove_all(self) -> list[Generation]:
        """Stop holding requests; returns them, oldest first."""
        return [one for one, _ in list(self._held.values()) if self.remove(one)]

    def _refuse(self, generation: Generation) -> None:
        self.remove(generation)
        message = f"the engine's slots are lent to a trainer; waited {self._wait_s:g} s"
        generation.fail(f"{message} (gateway.queue.wait_s)", Unavailable)

    def update(self) -> None:
        """Update after a change of requests."""
        if not self._somebody_waits():
            self._now = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None and self._now is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._after_s, self._report)

    async def reports(self) -> AsyncGenerator[rpb.WatchTrafficResponse]:
        """Yield the current report if it still holds, then every new report until `stop`. A report
        has the number of waiting requests, and the released workers.
        """
        last: rpb.WatchTrafficResponse | None = None
        while not self._stopped:
            if self._now is not None and self._now is not last:
                last = self._now
                yield last
            else:
                await self._change.wait()

    def stop(self) -> None:
        """End all `reports`."""
        self._stopped = True
        self._wake()
        if self._timer is not None:
            self._timer.cancel()

    def _report(self) -> None:
        self._timer = None
        if not self._somebody_waits():  # workers may return without a notice
            return
        released = [seat.index for seat in self._seats if seat.released]
        self._now = rpb.WatchTrafficResponse(requests=self._waiting(), workers=released)
        self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _somebody_waits(self) -> bool:
        return any(seat.released for seat in self._seats) and self._waiting() > 0

    def _waiting(self) -> int:
        waiting = len(self._held)
        for seat in self._seats:
            over = len(seat.live) - self._at_once
            if over > 0 and not seat.released:
                waiting += min(over, sum(one.pinned is None for one in seat.live.values()))
        return waiting
