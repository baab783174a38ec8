"""Holds engine workers on a host that is not their gateway's: joins the gateway, and does what it
is told. When the stream ends, so do the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from paceline.config import SecurityConfig
from paceline.errors import ConfigError, PacelineError
from paceline.rpc.hosts import JoinedHost
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.engines.worker.ring import RowArray
from paceline.services.rollout_gateway.workers.local import LocalWorker, LocalWorkers
from paceline.services.rollout_gateway.workers.parts import JoinedParts, parts
from paceline.services.rollout_gateway.workers.spool_copies import SpoolCopies
from paceline.v1 import engine_pb2
from paceline.v1 import workers_pb2 as pb
from paceline.v1.workers_pb2_grpc import WorkerHostServiceStub

ROWS_WAIT_BYTES = 64 << 20
"""What may wait for the network before hidden rows are dropped: tokens never are."""
_Service = JoinedHost[pb.HoldWorkersRequest, pb.HoldWorkersResponse]


class HeldWorker:
    """One life of a worker here, started and ended by its gateway elsewhere."""

    def __init__(
        self,
        life: int,
        worker: LocalWorker,
        gateway: _Service,
        path_of: Callable[[engine_pb2.PrepareWeights], Awaitable[str]] | None,
    ) -> None:
        """`path_of`: where what it is told to load is here; None: where it is told."""
        self._life = life
        self._worker = worker
        self._gateway = gateway
        self._path_of = path_of
        self._command = JoinedParts()
        self._rows_dropped = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    def begin(self, deadline_s: float, tasks: asyncio.TaskGroup) -> None:
        """Starts it in the group, and tells what becomes of it."""
        self._worker.ended.add_done_callback(lambda ended: self._say_end(ended.result()))
        self._tasks = tasks
        self._begin_task(self._start(deadline_s))

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _start(self, deadline_s: float) -> None:
        try:
            await self._worker.start(self._pass_on, deadline_s)
        except (PacelineError, OSError) as error:
            self._say_end(f"does not start: {error}")
            return
        started = pb.WorkerStarted(life=self._life, pid=self._worker.pid)
        self._gateway.say(pb.HoldWorkersRequest(started=started))

    def obey(self, command: pb.WorkerPart) -> None:
        """Passes a command on with its last part."""
        if (whole := self._command.add(command)) is None:
            return
        if self._path_of is not None:
            told = engine_pb2.WorkerCommand.FromString(whole)
            if told.HasField("prepare_weights"):
                self._begin_task(self._prepare(told))
                return
        self._worker.send(whole)

    async def _prepare(self, told: engine_pb2.WorkerCommand) -> None:
        """Has the worker load a copy of what it is told to load; answers in its place where there
        is none.
        """
        assert self._path_of is not None
        try:
            told.prepare_weights.path = await self._path_of(told.prepare_weights)
        except PacelineError as error:
            failed = wire.failed_to(error)
            self._pass_on(engine_pb2.WorkerEvent(command_id=told.command_id, failed=failed), None)
        else:
            self._worker.send(told.SerializeToString())

    def expect_end(self) -> None:
        """Its silence means nothing from now on."""
        self._worker.expect_end()

    async def close(self) -> None:
        """Ends it."""
        await cancel(*self._under_way)
        await self._worker.close()
        if not self._worker.ended.done():
            self._worker.ended.set_result("was ended")

    def _pass_on(self, event: engine_pb2.WorkerEvent, rows: RowArray | None) -> None:
        if rows is not None and len(rows):
            if self._gateway.waiting_bytes > ROWS_WAIT_BYTES:
                self._rows_dropped += len(rows)
            else:
                for part in parts(self._life, rows.tobytes()):
                    self._gateway.say(pb.HoldWorkersRequest(rows=part))
        for counts in ("tokens", "health"):
            if event.HasField(counts):
                getattr(event, counts).rows_dropped += self._rows_dropped
        for part in parts(self._life, event.SerializeToString()):
            self._gateway.say(pb.HoldWorkersRequest(event=part))

    def _say_end(self, reason: str) -> None:
        ended = pb.WorkerEnded(life=self._life, reason=reason)
        self._gateway.say(pb.HoldWorkersRequest(ended=ended))


class WorkerHost:
    """The engine workers of one host."""

    def __init__(
        self,
        local: LocalWorkers,
        host: int,
        first: int,
        spool: Path,
        same: Mapping[str, str],
        copies: SpoolCopies | None = None,
    ) -> None:
        """`first`: index of this host's first place among the gateway's workers, below 0 where a
        replica has but later ones; `spool`: of the gateway, whose weights they load; `copies`: of
        it, None where its path is here too.
        """
        self._copies = copies
        self._spool = spool
        self._local = local
        self._first = first
        self._joined = pb.HoldWorkersRequest(joined=pb.WorkerHostJoined(host=host, same=same))
        self._gateway: _Service = JoinedHost(self._join, "engine workers")
        self._stub: Any = None  # of the gateway's service, once it has joined
        self._held: dict[int, HeldWorker] = {}  # by life

    async def hold(self, address: str, security: SecurityConfig, connect_s: float) -> None:
        """Joins the gateway there and holds workers for it until it is gone; raises why. Afterwards
        no worker is left.
        """
        if self._copies is not None:
            self._joined.joined.copies_address = await self._copies.serve(address)
        await self._gateway.hold(
            self._joined, address, security, connect_s, self._obey, self._end_all
        )

    def _join(self, peer: grpc.aio.Channel) -> Any:
        self._stub = WorkerHostServiceStub(peer)  # type: ignore[no-untyped-call]
        return self._stub.HoldWorkers()

    async def _obey(self, order: pb.HoldWorkersResponse, tasks: asyncio.TaskGroup) -> None:
        kind = order.WhichOneof("order")
        if kind == "start":
            self._start(order.start, tasks)
            return
        told: Any = getattr(order, kind) if kind else None
        found = self._held.get(getattr(told, "life", 0))
        if found is None:
            return
        if kind == "command":
            found.obey(told)
        elif kind == "expect_end":
            found.expect_end()
        else:
            del self._held[told.life]
            tasks.create_task(found.close())

    def _start(self, start: pb.StartWorker, tasks: asyncio.TaskGroup) -> None:
        """What goes wrong ends no other worker here."""
        try:
            if self._copies is None and not self._spool.is_dir():
                raise ConfigError(
                    "its host does not have the gateway's spool",
                    seen=self._spool,
                    allowed="a path that all hosts share, or gateway.engine.shared_spool=false",
                )
            worker = self._local.make(start.worker_index, start.worker_index - self._first)
        except (PacelineError, OSError) as error:
            ended = pb.WorkerEnded(life=start.life, reason=f"does not start: {error}")
            self._gateway.say(pb.HoldWorkersRequest(ended=ended))
            return
        path_of = partial(self._copies.path_of, gateway=self._stub) if self._copies else None
        held = self._held[start.life] = HeldWorker(start.life, worker, self._gateway, path_of)
        held.begin(start.deadline_s, tasks)

    async def _end_all(self) -> None:
        held, self._held = list(self._held.values()), {}
        await asyncio.gather(*(one.close() for one in held))
