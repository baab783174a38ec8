"""Starts a worker for each place, and replaces those that are lost or do not start."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq

from paceline.errors import ConfigError, DataLoss, InternalError, PacelineError, Unavailable
from paceline.local.extras import require_extra
from paceline.local.forking import Forker
from paceline.local.news import tell_supervisor
from paceline.local.process_directory import process_directory
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.config import EngineConfig
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, RowRing
from paceline.services.rollout_gateway.engines.worker.spec import WorkerSpec
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.telemetry import get_logger
from paceline.v1 import engine_pb2 as pb

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0
"""Wait before a lost worker is replaced; it doubles while the replacement keeps dying."""
STARTS_BEFORE_GIVING_UP = 3
"""Failed starts in a row after which requests waiting for that worker fail (the starts go on)."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Size of each worker's ring and what its rows hold."""

    rows: int
    layout: RowLayout
    value_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's hidden state."""
        return self.layout.width * self.value_bytes


class Routing(Protocol):
    """What becomes of requests while their workers come and go."""

    async def equip(self, seat: Seat, process: WorkerProcess) -> None:
        """What a worker that is ready gets before its first request; an exception ends it."""
        ...

    def serves(self, seat: Seat) -> None:
        """The place has a worker that takes requests."""
        ...

    def tokens(self, seat: Seat, tokens: pb.TokensEmitted, rows: RowArray | None) -> None:
        """News of the worker in this place."""
        ...

    def lost(self, seat: Seat) -> None:
        """The worker in this place is gone."""
        ...

    def fail(self, seat: Seat, message: str, kind: type[PacelineError]) -> None:
        """Requests of this place end with such an error: none has started there for long."""
        ...


class WorkerKeeper:
    """Workers in their places. Use on one event loop: start, stop."""

    def __init__(
        self,
        config: EngineConfig,
        settings: dict[str, Any],
        rows: RowShape | None,
        seats: Sequence[Seat],
        routing: Routing,
        heartbeat_s: float,
        forker: Forker | None = None,
    ) -> None:
        """`settings`: of the engine's own class; `rows`: None where no hidden states are wanted;
        `forker`: of the engine's modules, begun already; it ends with `stop`.
        """
        self._config = config
        self._settings = settings
        self._rows = rows
        self._seats = seats
        self._routing = routing
        self._heartbeat_s = heartbeat_s
        kind = find_engine(config.kind)
        if kind.extra:
            require_extra(kind.extra, f"gateway.engine.kind={config.kind}")
        self._forker = forker or Forker(kind.forked, None)
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self.ready = pb.WorkerReady()
        """Facts of the engine, from the worker that was ready last."""

    async def start(self) -> None:
        """Start a worker in each place that is not vacant; returns when all serve, but for those
        that wait until what serves, and is damaged, is pushed again. Raises what the first failing
        one says; call `stop` then.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="w-", dir=process_directory()))
        self._context: zmq.Context[Any] = zmq.Context()
        there = [seat for seat in self._seats if not seat.vacant]
        await asyncio.gather(*(self._start_first(seat) for seat in there))
        for seat in there:
            self._begin_keeping(seat)

    async def add(self, seat: Seat) -> None:
        """Start a worker in a vacant place, which is it no more as soon as it serves. Raises what
        the worker says.
        """
        await self._start_worker(seat)
        seat.vacant = False
        self._begin_keeping(seat)

    async def remove(self, seat: Seat) -> None:
        """End the worker of a place that is vacant from now on."""
        await cancel(self._keepers.pop(seat.index, None))
        if seat.process is not None:
            await seat.process.stop()
            seat.process = None

    def _begin_keeping(self, seat: Seat) -> None:
        keeper = background(self._keep(seat), f"keeper of worker {seat.index}")
        self._keepers[seat.index] = keeper

    async def stop_keeping(self) -> None:
        """No worker is replaced any more."""
        await cancel(*self._keepers.values())

    async def stop(self) -> None:
        """End workers with Shutdown."""
        there = [seat.process for seat in self._seats if seat.process is not None]
        await asyncio.gather(*(process.stop() for process in there))
        for seat in self._seats:
            seat.process = None
        await self._forker.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _start_first(self, seat: Seat) -> None:
        try:
            await self._start_worker(seat)
        except DataLoss as error:
            if not self.ready.ListFields():  # the engine's own files are damaged
                raise
            self._tell_failed_start(seat, error)

    async def _start_worker(self, seat: Seat) -> None:
        """A worker that serves the committed versions."""
        rows = self._rows
        ring = RowRing.create(rows.rows, rows.row_bytes) if rows is not None else None
        spec = WorkerSpec(
            worker_index=seat.index,
            place=seat.number,
            kind=self._config.kind,
            threads=self._config.threads,
            cores=(seat.number,) if self._config.pin_cores else (),
            ring_path=str(ring.path) if ring is not None else "",
            engine=self._settings,
        )
        process = WorkerProcess(
            spec,
            self._forker,
            ring,
            self._directory,
            lambda tokens, rows: self._routing.tokens(seat, tokens, rows),
            self._heartbeat_s,
        )
        try:
            await process.start(self._context, self._config.ready_deadline_s)
            self._check_rows(process.ready)
            self.ready = process.ready
            await self._routing.equip(seat, process)
        except BaseException:
            await process.close()
            raise

        seat.process = process
        self._routing.serves(seat)

    def _check_rows(self, ready: pb.WorkerReady) -> None:
        """Raises ConfigError when the ring was cut for other rows than the engine's."""
        declared = wire.rows_from(ready)
        if self._rows is not None and declared != self._rows.layout:
            raise ConfigError(
                "the engine's rows do not fit their ring", seen=declared, allowed=self._rows.layout
            )

    async def _keep(self, seat: Seat) -> None:
        """Replace the worker whenever it is lost or could not start, unless its place is vacant."""
        while True:
            process = seat.process
            reason = await asyncio.shield(process.lost) if process is not None else ""
            seat.process = None
            lost_s = time.monotonic()
            if process is not None:
                log.warning("engine worker lost", worker=seat.index, reason=reason)
                tell_supervisor("impaired", f"engine worker {seat.index} {reason}")
                await process.close()
                metrics.WORKER_RESTARTS.record()
                self._routing.lost(seat)
            if seat.vacant:
                return
            await self._replace(seat)
            took_s = time.monotonic() - lost_s
            tell_supervisor("recovered", f"engine worker {seat.index} after {took_s:.1f} s")

    async def _replace(self, seat: Seat) -> None:
        backoff, failures = FIRST_BACKOFF_S, 0
        while seat.process is None:
            await asyncio.sleep(backoff)
            try:
                await self._start_worker(seat)
            except (PacelineError, OSError) as error:
                failures += 1
                message = self._tell_failed_start(seat, error)
                backoff = min(backoff * 2, MAX_BACKOFF_S)
                if failures >= STARTS_BEFORE_GIVING_UP:
                    damaged = isinstance(error, DataLoss)  # until it is pushed again
                    kind = Unavailable if damaged else InternalError
                    self._routing.fail(seat, message, kind)

    def _tell_failed_start(self, seat: Seat, error: PacelineError | OSError) -> str:
        message = f"engine worker {seat.index} does not start: {error}"
        log.error("engine worker does not start", worker=seat.index, error=str(error))
        tell_supervisor("impaired", message)
        return message
