"""Holds ranks of a trainer on a host that is not its service's: joins the service, and does what it
is told. When the stream ends, so do the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import grpc

from paceline.config import SecurityConfig
from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.ranks.group import RankGroup
from paceline.rpc import channel, rpc_errors, wait_ready
from paceline.v1 import ranks_pb2 as pb
from paceline.v1.ranks_pb2_grpc import RankHostServiceStub

_LISTEN_S = 3600.0


class RankHost:
    """The ranks of one host, started and ended by their service elsewhere."""

    def __init__(self, group: RankGroup, host: int, same: Mapping[str, str]) -> None:
        self._group = group
        self._joined = pb.HostJoined(host=host, same=same)
        self._news: asyncio.Queue[pb.HoldRanksRequest] = asyncio.Queue()
        self._working: asyncio.Task[None] | None = None

    async def hold(self, address: str, security: SecurityConfig, connect_s: float) -> None:
        """Joins the service there and holds ranks for it until it is gone; raises why. Afterwards
        no rank is left.
        """
        async with channel(address, security) as peer:
            await wait_ready(peer, connect_s)
            self._news = asyncio.Queue()
            self._say(joined=self._joined)
            call: Any = RankHostServiceStub(peer).HoldRanks()  # type: ignore[no-untyped-call]
            try:
                async with asyncio.TaskGroup() as tasks:
                    # The one writer: grpc.aio cancels the whole call with a cancelled write.
                    tasks.create_task(self._write(call))
                    await self._obey(call, tasks)
            except ExceptionGroup as several:
                if several.split(PacelineError)[1] is not None:
                    raise
                raise several.exceptions[0] from several
            finally:
                call.cancel()
                await self._end(0.0)

    async def close(self) -> None:
        """Ends what ranks are forked from."""
        await self._group.stop(0.0)

    async def _obey(self, call: Any, tasks: asyncio.TaskGroup) -> None:
        """Does what it is told; raises Unavailable at the end of the call."""
        with rpc_errors():
            while (order := await call.read()) is not grpc.aio.EOF:
                match order.WhichOneof("order"):
                    case "start":
                        await self._end(0.0)
                        self._working = tasks.create_task(self._work(order.start))
                    case "message":
                        with suppress(PacelineError):  # whoever listens to the ranks tells of it
                            await self._group.send(order.message)
                    case "kill":
                        self._group.kill()
                    case "end":
                        await self._end(order.end.grace_s)
                        self._say(ended=pb.RanksEnded())
        raise Unavailable("the service of the ranks has sent this host away")

    async def _work(self, start: pb.StartRanks) -> None:
        """Starts the ranks and passes on what they say, until one is lost."""
        try:
            await self._group.start(start.deadline_s, start.store)
            self._say(started=pb.RanksStarted(pids=self._group.pids))
            while True:
                with suppress(DeadlineExceeded):
                    rank, message = await self._group.receive(_LISTEN_S)
                    self._say(said=pb.RankSaid(rank=rank, message=message))
        except PacelineError as error:
            self._say(lost=str(error))

    async def _end(self, grace_s: float) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
            self._working = None
        await self._group.end_ranks(grace_s)

    def _say(self, **news: Any) -> None:
        self._news.put_nowait(pb.HoldRanksRequest(**news))

    async def _write(self, call: Any) -> None:
        with rpc_errors():
            while True:
                await call.write(await self._news.get())
