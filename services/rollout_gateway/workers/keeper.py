"""Starts a worker for each place, and replaces workers that are lost or fail to start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Protocol

from paceline.errors import ConfigError, DataLoss, InternalError, PacelineError, Unavailable
from paceline.local import launch, news
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.engines.worker import ring, wire
from paceline.services.rollout_gateway.workers.local import LocalWorkers
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.telemetry import get_logger
from paceline.v1 import engine_pb2 as pb

STARTS_BEFORE_GIVING_UP = 3
"""Failed starts in a row after which the requests of that worker fail; restarts continue."""

log = get_logger(__name__)


class Routing(Protocol):
    """Callbacks for the requests as workers start and end."""

    async def equip_worker(self, seat: Seat, process: WorkerProcess) -> None:
        """Prepare a ready worker before its first request; an exception ends the worker."""
        ...

    def flush_requests(self, seat: Seat) -> None:
        """The place has a worker that accepts requests."""
        ...

    def deliver_tokens(
        self, seat: Seat, tokens: pb.TokensEmitted, rows: ring.RowArray | None
    ) -> None:
        """The worker in this place has sent tokens."""
        ...

    def lose_worker(self, seat: Seat) -> None:
        """The worker in this place is lost."""
        ...

    def fail_requests(self, seat: Seat, message: str, kind: type[PacelineError]) -> None:
        """End the requests of this place with an error after repeated failed starts."""
        ...


class WorkerKeeper:
    """Keeps a worker in each place. Use on one event loop: start, stop."""

    def __init__(
        self, local: LocalWorkers, ready_s: float, seats: Sequence[Seat], routing: Routing
    ) -> None:
        """`local`: closed by `stop`. `ready_s`: deadline of a worker's start."""
        self._local = local
        self._ready_s = ready_s
        self._seats = seats
        self._routing = routing
        self._keepers: list[asyncio.Task[None]] = []
        self.ready = pb.WorkerReady()
        """The engine's properties, from the worker that became ready last."""

    async def start(self) -> None:
        """Start a worker in each place; returns when all serve.

        A worker that finds the serving set damaged may start later, after the next push. Raises the
        first start's error; the caller then calls `stop`.
        """
        found = await asyncio.gather(*(self._start_first(seat) for seat in self._seats))
        late = [error for error in found if error is not None]
        if late and not self.ready.ListFields():  # no worker serves
            raise late[0]
        self._keepers = [
            background(self._keep(seat), f"keeper of worker {seat.index}") for seat in self._seats
        ]

    async def stop_keeping(self) -> None:
        """Stop replacing workers."""
        await cancel(*self._keepers)

    async def stop(self) -> None:
        """Shut the workers down."""
        there = [seat.process for seat in self._seats if seat.process is not None]
        await asyncio.gather(*(process.stop() for process in there))
        for seat in self._seats:
            seat.process = None
        await self._local.close()

    async def _start_first(self, seat: Seat) -> PacelineError | None:
        """A start error that a push can repair while other workers serve; None after a successful
        start.
        """
        try:
            await self._start_worker(seat)
        except DataLoss as error:
            self._report_failed_start(seat, error)
            return error
        return None

    async def _start_worker(self, seat: Seat) -> None:
        """Start a worker that serves the committed versions.

        Raises ConfigError when the engine's row layout differs from the ring's.
        """
        process = self._local.make(seat.index, partial(self._routing.deliver_tokens, seat))
        try:
            await process.start(self._ready_s)
            declared, layout = wire.rows_from(process.ready), self._local.layout
            if layout is not None and declared != layout:
                message = "the engine's rows do not fit their ring"
                raise ConfigError(message, seen=declared, allowed=layout)
            self.ready = process.ready
            await self._routing.equip_worker(seat, process)
        except BaseException:
            await process.close()
            raise

        seat.process = process
        self._routing.flush_requests(seat)

    async def _keep(self, seat: Seat) -> None:
        """Replace the worker whenever it is lost or fails to start."""
        while True:
            process = seat.process
            reason = await asyncio.shield(process.lost) if process is not None else ""
            seat.process = None
            lost_s = time.monotonic()
            if process is not None:
                log.warning("engine worker lost", worker=seat.index, reason=reason)
                news.tell_supervisor("impaired", f"engine worker {seat.index} {reason}")
                await process.close()
                metrics.WORKER_RESTARTS.record()
                self._routing.lose_worker(seat)
            await self._replace(seat)
            took_s = time.monotonic() - lost_s
            news.tell_supervisor("recovered", f"engine worker {seat.index} after {took_s:.1f} s")

    async def _replace(self, seat: Seat) -> None:
        policy = launch.RestartPolicy(window_s=inf, base_s=0.2, cap_s=5.0)
        while seat.process is None:
            policy.note_end()
            await policy.pause()
            try:
                await self._start_worker(seat)
            except (PacelineError, OSError) as error:
                message = self._report_failed_start(seat, error)
                if len(policy.ends) >= STARTS_BEFORE_GIVING_UP:
                    kind = Unavailable if isinstance(error, DataLoss) else InternalError
                    self._routing.fail_requests(seat, message, kind)

    def _report_failed_start(self, seat: Seat, error: PacelineError | OSError) -> str:
        message = f"engine worker {seat.index} does not start: {error}"
        log.error("engine worker does not start", worker=seat.index, error=str(error))
        news.tell_supervisor("impaired", message)
        return message
