"""Picks the worker of a request, and counts what runs in each and since when nothing does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.rpc.progress import Activity
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.telemetry import names, past_span
from paceline.v1 import engine_pb2 as pb

STICKY_FACTOR = 2.0
STICKY_SLACK = 4
"""The worker that holds a session's KV cache keeps the session up to FACTOR times the others' mean
load plus SLACK.

A move costs a prefill of the whole conversation; staying costs a share of larger decode rounds,
whose seconds grow far slower than their rows. So twice the load is still the better place, and a
few requests on an idle machine are no load. Above that requests would queue there while others have
room.
"""


@dataclass(eq=False)
class Seat:
    """A worker's place; the process in it changes with restarts."""

    index: int
    process: WorkerProcess | None = None  # None while it starts
    first: int = 0  # number of this gateway's first worker among all of the run
    released: bool = False  # lent out, or about to be: gets no requests
    spare: bool = False  # released since nothing ran there; no trainer has asked for it yet
    lent: bool = False  # its process has given its memory back, or does so as soon as it starts
    unsent: list[Generation] = field(default_factory=list)
    live: dict[int, Generation] = field(default_factory=dict)  # changed by the methods below alone
    # requests that go on from their tokens once the engine has ended them: why
    moving: dict[int, str] = field(default_factory=dict)
    # chunks of a worker whose weights are on trial; None: they go out as they come
    withheld: list[pb.TokenChunk] | None = None
    idle_since_s: float | None = field(default_factory=time.monotonic)
    """time.monotonic() at which its last request ended; None while one is under way."""
    _busy_since_ns: int = 0
    activity: Activity = field(init=False)
    # told of the next change between idle and busy
    _watchers: set[asyncio.Future[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.activity = Activity(f"worker {self.index}")

    @property
    def number(self) -> int:
        """Of its worker among all of the run, as spans have it."""
        return self.first + self.index

    def add(self, generation: Generation) -> None:
        """Queue a request here."""
        generation.worker_index = self.index
        self.live[generation.request.request_id] = generation
        self.unsent.append(generation)
        if self.idle_since_s is not None:
            self.idle_since_s, self._busy_since_ns = None, time.time_ns()
            self.activity.begins("decodes")
            self._tell()

    def end(self, request_id: int) -> None:
        """A request of this place has ended."""
        del self.live[request_id]
        self._rest()

    def take_unsent(self) -> list[Generation]:
        """Take the requests away that no process has seen."""
        waiting, self.unsent = self.unsent, []
        for generation in waiting:
            del self.live[generation.request.request_id]
        self._rest()
        return waiting

    def suspend(self, reason: str) -> list[int]:
        """Requests that the process has; when it ends them they go on from their tokens."""
        unsent = {generation.request.request_id for generation in self.unsent}
        sent = sorted(self.live.keys() - unsent)
        self.moving.update(dict.fromkeys(sent, reason))
        return sent

    def clear(self) -> tuple[list[Generation], list[Generation]]:
        """Take all requests away; returns those that were sent and those that were not."""
        unsent = {id(generation) for generation in self.unsent}
        sent = [generation for generation in self.live.values() if id(generation) not in unsent]
        waiting, self.unsent, self.live = self.unsent, [], {}
        self.moving.clear()
        self.withheld = None
        self._rest()
        return sent, waiting

    async def idle_for(self, seconds: float) -> None:
        """Returns once nothing has run here for so many seconds on end.

        Sleeps between the changes; does not poll.
        """
        while True:
            left_s = (
                None
                if self.idle_since_s is None
                else self.idle_since_s + seconds - time.monotonic()
            )
            if left_s is not None and left_s <= 0:
                return
            change = asyncio.get_running_loop().create_future()
            self._watchers.add(change)
            try:
                await asyncio.wait((change,), timeout=left_s)
            finally:
                self._watchers.discard(change)

    async def idle_within(self, seconds: float) -> bool:
        """Whether all requests here have ended in time."""
        try:
            async with asyncio.timeout(seconds):
                await self.idle_for(0)
        except TimeoutError:
            return False
        return True

    def _rest(self) -> None:
        if not self.live and self.idle_since_s is None:
            self.idle_since_s = time.monotonic()
            self.activity.begins("")
            past_span(names.ENGINE_BUSY, {names.WORKER: self.number}, self._busy_since_ns)
            self._tell()

    def _tell(self) -> None:
        watchers, self._watchers = self._watchers, set()
        for change in watchers:
            change.set_result(None)


def choose(seats: Sequence[Seat], prefer: int | None) -> Seat | None:
    """The place of a request that may go anywhere: `prefer`, which has its prefix in cache, else
    the least loaded; None while all are released.

    Places without a process count only when there is no other.
    """
    there = [seat for seat in seats if not seat.released]
    kept = [seat for seat in there if seat.process is not None] or there
    held = next((seat for seat in kept if seat.index == prefer), None)
    if held is not None and not _overloaded(held, kept):
        return held
    return min(kept, key=lambda seat: len(seat.live), default=None)


def _overloaded(held: Seat, kept: Sequence[Seat]) -> bool:
    others = [len(seat.live) for seat in kept if seat is not held]
    return (
        bool(others) and len(held.live) > STICKY_FACTOR * sum(others) / len(others) + STICKY_SLACK
    )
