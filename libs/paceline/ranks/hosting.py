"""Holds ranks of a trainer on a host that is not its service's: joins the service, and does what it
is told. When the stream ends, so do the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.config import SecurityConfig
from paceline.errors import DeadlineExceeded, PacelineError
from paceline.messages import from_message
from paceline.ranks.group import HostShare, RankGroup
from paceline.rpc.hosts import JoinedHost
from paceline.v1 import ranks_pb2 as pb
from paceline.v1.ranks_pb2_grpc import RankHostServiceStub

_LISTEN_S = 3600.0


class RankHost:
    """The ranks of one host, started and ended by their service elsewhere."""

    def __init__(self, group: RankGroup, host: int, same: Mapping[str, str]) -> None:
        self._group = group
        self._joined = pb.HoldRanksRequest(joined=pb.HostJoined(host=host, same=same))
        self._service: JoinedHost[pb.HoldRanksRequest, pb.HoldRanksResponse] = JoinedHost(
            lambda peer: RankHostServiceStub(peer).HoldRanks(),  # type: ignore[no-untyped-call]
            "ranks",
        )
        self._working: asyncio.Task[None] | None = None
        group.on_progress = self._pass_on

    async def hold(self, address: str, security: SecurityConfig, connect_s: float) -> None:
        """Joins the service there and holds ranks for it until it is gone; raises why. Afterwards
        no rank is left.
        """
        await self._service.hold(
            self._joined, address, security, connect_s, self._obey, lambda: self._end(0.0)
        )

    async def close(self) -> None:
        """Ends what ranks are forked from."""
        await self._group.stop(0.0)

    async def _obey(self, order: pb.HoldRanksResponse, tasks: asyncio.TaskGroup) -> None:
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

    async def _work(self, start: pb.StartRanks) -> None:
        """Starts the ranks and passes on what they say, until one is lost."""
        try:
            self._group.resize(from_message(HostShare, start.share))
            await self._group.start(start.deadline_s, start.store)
            self._say(started=pb.RanksStarted(pids=self._group.pids))
            while True:
                with suppress(DeadlineExceeded):
                    rank, message = await self._group.receive(_LISTEN_S)
                    self._say(said=pb.RankSaid(rank=rank, message=message))
        except PacelineError as error:
            self._say(lost=str(error))

    def _pass_on(self, rank: int, message: bytes) -> bool:
        """Sends it to the service, which keeps what has to wait."""
        self._say(said=pb.RankSaid(rank=rank, message=message))
        return True

    async def _end(self, grace_s: float) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
            self._working = None
        await self._group.end_ranks(grace_s)

    def _say(self, **news: Any) -> None:
        self._service.say(pb.HoldRanksRequest(**news))
