"""Starts the engine workers, sends them requests, gives their tokens out, replaces the lost ones.

A lost worker is replaced; its requests go on from the tokens they had told on the replacement, or
on another worker. What requests mean (sessions, rewards) is not known here.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq.asyncio

from paceline.errors import ConfigError, DataLoss, InternalError, PacelineError, Unavailable
from paceline.local.heartbeat import LIMIT_S
from paceline.local.news import tell_supervisor
from paceline.local.process_directory import process_directory
from paceline.telemetry import get_logger
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway import metrics
from rollout_gateway.background import background, cancel
from rollout_gateway.config import EngineConfig
from rollout_gateway.engines.nouns import RowLayout
from rollout_gateway.engines.worker import wire
from rollout_gateway.engines.worker.ring import RowArray, RowRing
from rollout_gateway.engines.worker.spec import WorkerSpec
from rollout_gateway.workers.evidence_exchange import EvidenceExchange
from rollout_gateway.workers.generation import Generation
from rollout_gateway.workers.held import HeldRequests
from rollout_gateway.workers.lending import Loans
from rollout_gateway.workers.metrics import EngineMetrics
from rollout_gateway.workers.placement import Seat, choose
from rollout_gateway.workers.probes import Probes
from rollout_gateway.workers.process import WorkerProcess
from rollout_gateway.workers.waiting import WaitingTraffic

MAX_TRIES = 3
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


class Router:
    """Routes requests to `count` workers. Use on one event loop: start, submit, stop."""

    def __init__(
        self,
        count: int,
        config: EngineConfig,
        settings: dict[str, Any],
        rows: RowShape | None,
        on_rows: Callable[[RowArray], None],
        on_discard: Callable[[int], None],
        wait_s: float,
        reclaim_after_s: float,
        heartbeat_s: float = LIMIT_S,
    ) -> None:
        """wait_s: seconds that a request waits while all workers are lent; reclaim_after_s: those
        after which `traffic` tells of it.
        """
        self._config = config
        self._settings = settings
        self._rows = rows
        self._on_rows = on_rows
        self._on_discard = on_discard  # rows of a request whose next try gives them again
        self._heartbeat_s = heartbeat_s
        self._slots = [Seat(index) for index in range(count)]
        self._keepers: list[asyncio.Task[None]] = []
        self._flushing = False
        self._held = HeldRequests(wait_s)
        self.traffic = WaitingTraffic(self._slots, self._held, config.max_batch, reclaim_after_s)
        self.loans = Loans(self._slots, self._held, config.command_deadline_s, self._place)
        self.on_ready: Callable[[WorkerProcess], Any] | None = None
        """Awaited before a worker gets requests: loads the committed versions."""
        self.ready = pb.WorkerReady()
        """Facts of the engine, from the worker that was ready last."""
        self.rows_dropped = [0] * count
        self.metrics = EngineMetrics(config.kind)
        self.evidence = EvidenceExchange()
        self.probes = Probes(self._flush, self._deliver, self.abort)

    @property
    def count(self) -> int:
        """Workers, ready or not."""
        return len(self._slots)

    @property
    def seats(self) -> Sequence[Seat]:
        """Places of the workers, by index."""
        return self._slots

    def processes(self) -> list[WorkerProcess]:
        """Workers that serve now."""
        return [slot.process for slot in self._slots if slot.process is not None]

    async def start(self) -> None:
        """Start all workers; returns when all serve, but for those that wait until what serves,
        and is damaged, is pushed again. Raises what the first failing one says.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="w-", dir=process_directory()))
        self._context = zmq.asyncio.Context()
        try:
            await asyncio.gather(*(self._start_first(slot) for slot in self._slots))
        except BaseException:
            await self.stop()
            raise
        self._keepers = [
            background(self._keep(slot), f"keeper of worker {slot.index}") for slot in self._slots
        ]

    async def stop(self) -> None:
        """End requests with an error and workers with Shutdown."""
        await cancel(*self._keepers)
        for slot in self._slots:
            self._fail(slot, "the gateway is stopping")
        for generation in self._held.take_all():
            generation.fail("the gateway is stopping")
        await asyncio.gather(*(process.stop() for process in self.processes()))
        for slot in self._slots:
            slot.process = None
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def submit(
        self,
        request: pb.EngineRequest,
        *,
        worker: int | None = None,
        prefer: int | None = None,
        rerun: bool = True,
    ) -> Generation:
        """Queue a request: on `worker` only, else on `prefer` unless that one is gone, released or
        overloaded.

        Else on the least loaded; see placement.choose. It waits while none of these may serve.
        rerun False: it ends as unavailable when its worker is lost and no other serves.
        """
        generation = Generation(request, worker, rerun=rerun)
        self.probes.note(request)
        self._place(generation, prefer)
        return generation

    def abort(self, generation: Generation) -> None:
        """Stop a request; it ends with FINISH_REASON_ABORT."""
        slot = self._slots[generation.worker_index]
        request_id = generation.request.request_id
        ended = pb.TokenChunk(request_id=request_id, finish_reason=tpb.FINISH_REASON_ABORT)
        if self._held.take(generation):
            generation.accept(ended)
        if request_id not in slot.live:
            return
        slot.moving.pop(request_id, None)
        if generation in slot.unsent or slot.process is None:
            if generation in slot.unsent:
                slot.unsent.remove(generation)
            self._deliver(slot, ended)
        else:
            slot.process.send(pb.WorkerCommand(abort=pb.AbortRequests(request_ids=[request_id])))

    async def ask_all(
        self,
        command: pb.WorkerCommand,
        processes: Iterable[WorkerProcess] | None = None,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Ask workers at once (default: all that serve); answers or exceptions, in their order.

        deadline_s: of each answer; None is engine.command_deadline_s.
        """
        asked = list(self.processes() if processes is None else processes)
        copies = [pb.WorkerCommand() for _ in asked]
        for copy in copies:
            copy.CopyFrom(command)
        deadline = self._config.command_deadline_s if deadline_s is None else deadline_s
        return await asyncio.gather(
            *(process.ask(copy, deadline) for process, copy in zip(asked, copies, strict=True)),
            return_exceptions=True,
        )

    async def commit(self, process: WorkerProcess, commit: pb.CommitWeights) -> None:
        """Have a worker serve a set. Requests that it ends for it go on under the new policy.

        Raises what WorkerProcess.ask does.
        """
        if commit.mode == pb.PAUSE_MODE_ABORT:
            # Nothing is sent between this and the command: what is sent later is not ended.
            self._slots[process.index].suspend("commit")
        command = pb.WorkerCommand(commit_weights=commit)
        await process.ask(command, self._config.command_deadline_s)

    async def healths(self, deadline_s: float | None = None) -> dict[int, pb.WorkerHealth]:
        """Load and statistics by worker; those that do not answer are left out. What they learned
        goes round.

        deadline_s: of each answer; None is engine.command_deadline_s.
        """
        processes = self.processes()
        answers = await self.ask_all(
            pb.WorkerCommand(get_health=pb.GetHealth()), processes, deadline_s
        )
        found = {
            p.index: a.health
            for p, a in zip(processes, answers, strict=True)
            if isinstance(a, pb.WorkerEvent)
        }
        for process in processes:
            if process.index in found:
                self.metrics.look(process.ready, found[process.index])
        self.evidence.spread(processes, found)
        return found

    async def idle_for(self, index: int, seconds: float) -> None:
        """Returns once the worker has had no request for so many seconds on end."""
        await self._slots[index].idle_for(seconds)

    def _place(self, generation: Generation, prefer: int | None = None) -> None:
        pinned = generation.pinned
        slot = self._slots[pinned] if pinned is not None else choose(self._slots, prefer)
        if slot is None or slot.released:
            self._held.add(generation)
            self.traffic.look()
            return
        slot.add(generation)
        self.traffic.look()
        if not self._flushing:
            # Requests of one turn of the event loop leave in one message, so that the engine admits
            # them together.
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        for slot in self._slots:
            if slot.process is not None and slot.unsent:
                requests = [generation.request for generation in slot.unsent]
                slot.unsent = []
                slot.process.send(pb.WorkerCommand(enqueue=pb.EnqueueRequests(requests=requests)))

    def _on_tokens(self, slot: Seat, tokens: pb.TokensEmitted, rows: RowArray | None) -> None:
        slot.activity.moves()
        self.rows_dropped[slot.index] = tokens.rows_dropped
        if rows is not None and len(rows):
            self._on_rows(rows)
        for chunk in tokens.chunks:
            self._deliver(slot, chunk)

    def _deliver(self, slot: Seat, chunk: pb.TokenChunk) -> None:
        generation = slot.live.get(chunk.request_id)
        if generation is None or self.probes.withholds(slot, generation, chunk):
            return
        metrics.TOKENS.record(len(chunk.token_ids))
        reason = slot.moving.get(chunk.request_id)
        moves = reason is not None and chunk.finish_reason == tpb.FINISH_REASON_ABORT
        if moves:
            generation.suspended(chunk)
        else:
            generation.accept(chunk)
        if moves or generation.finished:
            slot.moving.pop(chunk.request_id, None)
            slot.end(chunk.request_id)
        if generation.finished:
            self.traffic.look()
            self.metrics.ended(generation)
        elif moves:
            metrics.REQUESTS_SUSPENDED.record(reason=str(reason))
            self._on_discard(chunk.request_id)
            self._place(generation)

    async def _start_first(self, slot: Seat) -> None:
        try:
            await self._start_worker(slot)
        except DataLoss as error:
            if not self.ready.ListFields():  # the engine's own files are damaged
                raise
            self._tell_failed_start(slot, error)

    async def _start_worker(self, slot: Seat) -> None:
        """A worker that serves the committed versions."""
        rows = self._rows
        ring = RowRing.create(rows.rows, rows.row_bytes) if rows is not None else None
        spec = WorkerSpec(
            worker_index=slot.index,
            kind=self._config.kind,
            threads=self._config.threads,
            cores=(slot.index,) if self._config.pin_cores else (),
            ring_path=str(ring.path) if ring is not None else "",
            engine=self._settings,
        )
        process = WorkerProcess(
            spec,
            ring,
            self._directory,
            lambda tokens, rows: self._on_tokens(slot, tokens, rows),
            self._heartbeat_s,
        )
        try:
            await process.start(self._context, self._config.ready_deadline_s)
            self._check_rows(process.ready)
            self.ready = process.ready
            if self.on_ready is not None:
                await self.on_ready(process)
            await self.loans.started(slot, process)
        except BaseException:
            await process.close()
            raise

        slot.process = process
        self._flush()

    def _check_rows(self, ready: pb.WorkerReady) -> None:
        """Raises ConfigError when the ring was cut for other rows than the engine's."""
        declared = wire.rows_from(ready)
        if self._rows is not None and declared != self._rows.layout:
            raise ConfigError(
                "the engine's rows do not fit their ring", seen=declared, allowed=self._rows.layout
            )

    async def _keep(self, slot: Seat) -> None:
        """Replace the worker whenever it is lost or could not start."""
        while True:
            process = slot.process
            reason = await asyncio.shield(process.lost) if process is not None else ""
            slot.process = None
            lost_s = time.monotonic()
            if process is not None:
                log.warning("engine worker lost", worker=slot.index, reason=reason)
                tell_supervisor("impaired", f"engine worker {slot.index} {reason}")
                await process.close()
                metrics.WORKER_RESTARTS.record()
                self._requeue(slot)
            await self._replace(slot)
            took_s = time.monotonic() - lost_s
            tell_supervisor("recovered", f"engine worker {slot.index} after {took_s:.1f} s")

    async def _replace(self, slot: Seat) -> None:
        backoff, failures = FIRST_BACKOFF_S, 0
        while slot.process is None:
            await asyncio.sleep(backoff)
            try:
                await self._start_worker(slot)
            except (PacelineError, OSError) as error:
                failures += 1
                message = self._tell_failed_start(slot, error)
                backoff = min(backoff * 2, MAX_BACKOFF_S)
                if failures >= STARTS_BEFORE_GIVING_UP:
                    damaged = isinstance(error, DataLoss)  # until it is pushed again
                    self._fail(slot, message, Unavailable if damaged else InternalError)

    def _tell_failed_start(self, slot: Seat, error: PacelineError | OSError) -> str:
        message = f"engine worker {slot.index} does not start: {error}"
        log.error("engine worker does not start", worker=slot.index, error=str(error))
        tell_supervisor("impaired", message)
        return message

    def _requeue(self, slot: Seat) -> None:
        sent, unsent = slot.clear()
        for generation in sent:
            generation.lost()
            self._on_discard(generation.request.request_id)
        for generation in (*sent, *unsent):
            if generation.tries >= MAX_TRIES:
                generation.fail(
                    f"the engine worker was lost {generation.tries} times under this request"
                )
            elif not generation.rerun and not self.processes():
                generation.fail("the engine is starting again; try later", Unavailable)
            else:
                self._place(generation)

    def _fail(self, slot: Seat, message: str, kind: type[PacelineError] = InternalError) -> None:
        for generations in slot.clear():
            for generation in generations:
                generation.fail(message, kind)
