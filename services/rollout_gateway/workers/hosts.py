"""The engine workers of other hosts as their gateway sees them: hosts join it by a stream of its
own server, say what their workers say, and do what they are told. Their side is hosting.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

import numpy as np

from paceline.errors import DeadlineExceeded, FailedPrecondition, InvalidInput, Unavailable
from paceline.local.patience import patient
from paceline.rpc.hosts import HostStream, check_same, first_word
from paceline.services.rollout_gateway.background import background
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, row_dtype
from paceline.services.rollout_gateway.workers.life import OnEvent, taken_or_killed
from paceline.services.rollout_gateway.workers.local import STOP_GRACE_S, RowShape
from paceline.services.rollout_gateway.workers.parts import JoinedParts, parts
from paceline.services.rollout_gateway.workers.spool_reading import (
    read_spooled,
    source_of,
)
from paceline.v1 import engine_pb2
from paceline.v1 import workers_pb2 as pb
from paceline.v1.workers_pb2_grpc import WorkerHostServiceServicer
from paceline.weights import Spool

SERVICE = "paceline.v1.WorkerHostService"
HOST_AWAY = "HOST_AWAY"
"""Reason of the error of a worker that is not started since its host has not joined."""
JOIN_S = 60.0
"""Seconds that the start of a worker waits for its host."""
_Stream = HostStream[pb.HoldWorkersRequest, pb.HoldWorkersResponse]
_lives = itertools.count(1)


class HostWorkers:
    """The workers of one other host. It may come and go; those that ran on it are lost."""

    def __init__(self, host: int) -> None:
        self.host = host
        self.copies_address = ""
        """Where others may copy versions from, as it says."""
        self._joined = asyncio.Event()
        self._stream: _Stream | None = None
        self._lives: dict[int, HostedWorker] = {}  # of this stream

    @property
    def away(self) -> bool:
        """Whether it has not joined, or has gone."""
        return self._stream is None

    @property
    def holds(self) -> bool:
        """Whether it is there and has workers."""
        return self._stream is not None and bool(self._lives)

    async def hold(
        self, requests: AsyncIterator[Any], copies_address: str
    ) -> AsyncGenerator[pb.HoldWorkersResponse]:
        """Takes the host in for as long as its stream lasts. Raises FailedPrecondition where one of
        this number is there.
        """
        if self._stream is not None:
            raise FailedPrecondition(
                "a host of this number holds workers already",
                reason="HOST_JOINED",
                seen=f"host {self.host}",
            )
        self._stream = stream = _Stream()
        self.copies_address = copies_address
        self._lives = lives = dict[int, HostedWorker]()
        background(self._hear(stream, lives), f"host {self.host} of workers")
        self._joined.set()
        try:
            async with aclosing(stream.orders(requests)) as orders:
                async for order in orders:
                    yield order
        finally:
            self._stream = None
            self._joined.clear()

    async def begin(self, life: HostedWorker, deadline_s: float) -> _Stream:
        """Has the host start a worker, once it has joined. Raises Unavailable where it does not."""
        try:
            async with asyncio.timeout(min(deadline_s, patient(JOIN_S))):
                while (stream := self._stream) is None:
                    await self._joined.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"host {self.host} of the engine workers has not joined",
                reason=HOST_AWAY,
                seen=f"{min(deadline_s, patient(JOIN_S)):.0f} s",
            ) from error
        self._lives[life.number] = life
        start = pb.StartWorker(life=life.number, worker_index=life.index, deadline_s=deadline_s)
        stream.order(pb.HoldWorkersResponse(start=start))
        return stream

    def forget(self, life: HostedWorker) -> None:
        """Nothing that it says counts any more."""
        self._lives.pop(life.number, None)

    async def _hear(self, stream: _Stream, lives: dict[int, HostedWorker]) -> None:
        """Gives out what the host says, to the end of its stream: then its workers are lost."""
        while (news := await stream.heard.get()) is not None:
            kind = news.WhichOneof("news")
            said = getattr(news, kind) if kind else None
            life = lives.get(getattr(said, "life", 0))
            if life is not None:
                life.take(str(kind), said)
        for life in list(lives.values()):
            life.end(f"is lost with host {self.host}")


class HostedWorker:
    """A WorkerLife on another host."""

    def __init__(self, host: HostWorkers, index: int, rows: RowShape | None) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.index = index
        self.number = next(_lives)
        self.pid = 0
        self._host = host
        self._row = row_dtype(rows.row_bytes) if rows is not None else None
        ring_bytes = rows.rows * row_dtype(rows.row_bytes).itemsize if rows is not None else 0
        self._runs = asyncio.Event()
        self._stream: _Stream | None = None
        self._parts = {"rows": JoinedParts(ring_bytes), "event": JoinedParts()}
        self._rows = b""  # that its next event tells of

    @property
    def pid_here(self) -> int:
        """See WorkerLife."""
        return 0

    async def start(self, on_event: OnEvent, deadline_s: float) -> None:
        """See WorkerLife."""
        self._on_event = on_event
        self._stream = await self._host.begin(self, deadline_s)
        running = asyncio.create_task(self._runs.wait())
        try:
            await asyncio.wait(
                (running, self.ended), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            running.cancel()
        if not (self._runs.is_set() or self.ended.done()):
            raise DeadlineExceeded(
                f"host {self._host.host} has not started engine worker {self.index}",
                seen=f"{deadline_s} s",
            )

    def send(self, command: bytes) -> None:
        """See WorkerLife."""
        if self._stream is not None:
            for part in parts(self.number, command):
                self._stream.order(pb.HoldWorkersResponse(command=part))

    def expect_end(self) -> None:
        """See WorkerLife."""
        self._order(expect_end=pb.ExpectWorkerEnd(life=self.number))

    def kill(self) -> None:
        """See WorkerLife."""
        self._order(kill=pb.KillWorker(life=self.number))

    async def close(self) -> None:
        """See WorkerLife."""
        self.kill()  # of one that has ended its host frees what belonged to it
        if self._stream is not None:
            await asyncio.wait((self.ended,), timeout=STOP_GRACE_S)
        self._host.forget(self)

    def end(self, reason: str) -> None:
        """It has ended so."""
        if not self.ended.done():
            self.ended.set_result(reason)

    def take(self, kind: str, said: Any) -> None:
        """What its host says of it."""
        if kind == "started":
            self.pid = said.pid
            self._runs.set()
        elif kind == "ended":
            self.end(said.reason)
        else:
            with taken_or_killed(self.index, self):
                self._take_part(kind, said)

    def _take_part(self, kind: str, part: pb.WorkerPart) -> None:
        whole = self._parts[kind].add(part)
        if whole is None:
            return
        if kind == "rows":
            self._rows = whole
            return
        told, self._rows = self._rows, b""
        rows: RowArray | None = None
        if self._row is not None:
            rows = np.frombuffer(told, dtype=self._row)
        self._on_event(engine_pb2.WorkerEvent.FromString(whole), rows)

    def _order(self, **order: Any) -> None:
        if self._stream is not None:
            self._stream.order(pb.HoldWorkersResponse(**order))


class WorkerHosts(WorkerHostServiceServicer):
    """The hosts of a gateway beside its own."""

    def __init__(
        self,
        places: Sequence[int],
        rows: RowShape | None,
        same: Mapping[str, str],
        spool: Spool,
        fan_out: int = 0,
    ) -> None:
        """`places`: workers on each host, the gateway's own first; `same`: what each of them has to
        have alike, by name; `spool`: what those without a path to it read, `fan_out` of them (0:
        all) from here and from each other.
        """
        self._spool = spool
        self._fan_out = fan_out
        numbers = [number for number, count in enumerate(places) if number and count]
        self._hosts = {number: HostWorkers(number) for number in numbers}
        self._ends = list(accumulate(places))  # of the places of each host
        self._rows = rows
        self._same = dict(same)

    def host_of(self, index: int) -> int:
        """On which host a worker is; 0 is the gateway's own."""
        return next(host for host, end in enumerate(self._ends) if index < end)

    def away(self, host: int) -> bool:
        """Whether a host is not there."""
        return host > 0 and self._hosts[host].away

    def make(self, index: int) -> HostedWorker:
        """A worker of another host, that is to be started there."""
        return HostedWorker(self._hosts[self.host_of(index)], index, self._rows)

    async def HoldWorkers(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[pb.HoldWorkersResponse]:
        """A host joins. Raises InvalidInput for one that is not expected, ConfigError for one that
        differs.
        """
        joined = await first_word(requests)
        host = self._hosts.get(joined.host)
        if host is None:
            raise InvalidInput(
                "no engine workers are expected on this host",
                seen=f"host {joined.host}",
                allowed=", ".join(map(str, self._hosts)),
            )
        check_same(joined.host, self._same, dict(joined.same), "workers")
        async with aclosing(host.hold(requests, joined.copies_address)) as orders:
            async for order in orders:
                yield order

    async def ReadSpooled(
        self, request: pb.ReadSpooledRequest, context: Any
    ) -> AsyncIterator[pb.ReadSpooledResponse]:
        """See read_spooled."""
        addresses = {one.host: one.copies_address for one in self._hosts.values() if one.holds}
        source = source_of(request.host, addresses, self._fan_out)
        async with aclosing(read_spooled(self._spool, request, source)) as parts_of_file:
            async for response in parts_of_file:
                yield response
