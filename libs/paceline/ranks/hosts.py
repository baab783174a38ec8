"""The ranks of other hosts as their service sees them: hosts join it by a stream of its own server,
say what becomes of their ranks, and do what they are told. Their side is hosting.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from paceline.errors import DeadlineExceeded, FailedPrecondition, InvalidInput
from paceline.local.patience import patient
from paceline.messages import to_message
from paceline.ranks.group import HostShare, RankLost
from paceline.rpc.hosts import HostStream, check_same, first_word
from paceline.v1 import ranks_pb2 as pb
from paceline.v1.ranks_pb2_grpc import RankHostServiceServicer

_ENDED_S = 10.0
"""Longer than its grace that a host may take until it has ended its ranks."""


_Stream = HostStream[pb.HoldRanksRequest, pb.HoldRanksResponse]


class HostRanks:
    """The ranks of one other host, used like a RankGroup once resize() has told it which. The host
    may come and go; ranks that ran on it are lost.
    """

    def __init__(self, host: int, name: str) -> None:
        self.host = host
        self._name = name
        self._share = HostShare(0, 0, 0)
        self._joined = asyncio.Event()
        self._connection: _Stream | None = None
        self._ranks: _Stream | None = None  # that they were started by; None: none runs
        self._early: list[tuple[int, bytes]] = []  # said while others were not ready
        self._lost: RankLost | None = None
        self._heard_s = time.monotonic()
        self.pids: list[int] = []
        self.on_progress: Callable[[int, bytes], bool] = lambda rank, message: False
        """As RankGroup.on_progress."""

    @property
    def still_s(self) -> float:
        """Seconds since the last news of the host."""
        return time.monotonic() - self._heard_s

    @property
    def pids_here(self) -> list[int]:
        """None of these is on this host."""
        return []

    @property
    def size(self) -> int:
        """As RankGroup.size."""
        return self._share.ranks

    def resize(self, share: HostShare) -> None:
        """As RankGroup.resize; the host is told with the next start."""
        if self._ranks is not None:
            raise FailedPrecondition(
                f"the ranks of {self._name} stay as many as they are while they run",
                seen=f"{self.size} run on host {self.host}",
            )
        self._share = share

    async def hold(self, requests: AsyncIterator[Any]) -> AsyncGenerator[pb.HoldRanksResponse]:
        """Takes the host in for as long as its stream lasts. Raises FailedPrecondition where one of
        this number is there.
        """
        if self._connection is not None:
            raise FailedPrecondition(
                "a host of this number holds ranks already",
                reason="HOST_JOINED",
                seen=f"host {self.host}",
            )
        self._connection = connection = _Stream()
        self._joined.set()
        try:
            async with aclosing(connection.orders(requests)) as orders:
                async for order in orders:
                    yield order
        finally:
            self._connection = None
            self._joined.clear()

    async def start(self, deadline_s: float, store: str = "") -> None:
        """As RankGroup.start, once the host has joined. The host keeps the ranks' deadline, by what
        they use there, and gets as long again until it has sent its verdict.
        """
        try:
            async with asyncio.timeout(max(deadline_s, 0)):
                while (connection := self._connection) is None:
                    await self._joined.wait()
            self._ranks = connection
            share = to_message(self._share, pb.RankShare)
            start = pb.StartRanks(store=store, deadline_s=deadline_s, share=share)
            connection.order(pb.HoldRanksResponse(start=start))
            while not self.pids:
                async with asyncio.timeout(2 * patient(deadline_s)):
                    said = await self._hear()
                if said is not None and not self.on_progress(*said):
                    self._early.append(said)
        except TimeoutError as error:
            have = "started its ranks" if self._ranks else "joined"
            raise DeadlineExceeded(
                f"host {self.host} of {self._name} has not {have}", seen=f"{deadline_s:.1f} s"
            ) from error

    async def send(self, message: bytes) -> None:
        """As RankGroup.send."""
        if self._lost is not None:
            raise self._lost
        self._running.order(pb.HoldRanksResponse(message=message))

    async def receive(self, deadline_s: float) -> tuple[int, bytes]:
        """As RankGroup.receive."""
        if self._early:
            return self._early.pop(0)
        try:
            async with asyncio.timeout(max(deadline_s, 0)):
                while True:
                    said = await self._hear()
                    if said is not None:
                        return said
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no rank of host {self.host} spoke in time", seen=f"{deadline_s:.1f} s"
            ) from error

    async def end_ranks(self, grace_s: float) -> None:
        """As RankGroup.end_ranks; a host that does not say that it has is sent away, which ends
        them too.
        """
        connection, self._ranks = self._ranks, None
        self.pids, self._early, self._lost = [], [], None
        if connection is None or connection is not self._connection:
            return
        connection.order(pb.HoldRanksResponse(end=pb.EndRanks(grace_s=grace_s)))
        try:
            async with asyncio.timeout(grace_s + _ENDED_S):
                while (heard := await connection.heard.get()) is not None:
                    if heard.WhichOneof("news") == "ended":
                        return
        except TimeoutError:
            connection.close()

    async def stop(self, grace_s: float = 5.0) -> None:
        """As end_ranks: the host stays."""
        await self.end_ranks(grace_s)

    def kill(self) -> None:
        """SIGKILL every rank, without waiting."""
        if self._ranks is not None:
            self._ranks.order(pb.HoldRanksResponse(kill=pb.KillRanks()))

    @property
    def _running(self) -> _Stream:
        if self._ranks is None:
            raise FailedPrecondition(f"the ranks of {self._name} do not run; start() them")
        return self._ranks

    async def _hear(self) -> tuple[int, bytes] | None:
        """What a rank says next, None for other news. Raises RankLost."""
        if self._lost is not None:
            raise self._lost
        heard = await self._running.heard.get()
        if heard is None:
            self._lost = RankLost(f"host {self.host} of {self._name} is gone with its ranks")
            raise self._lost
        self._heard_s = time.monotonic()
        match heard.WhichOneof("news"):
            case "started":
                self.pids = list(heard.started.pids)
            case "said":
                return heard.said.rank, heard.said.message
            case "lost":
                self._lost = RankLost(f"host {self.host}: {heard.lost}")
                raise self._lost
        return None


class RankHosts(RankHostServiceServicer):
    """The hosts of a trainer beside its own."""

    def __init__(self, hosts: int, name: str, same: Mapping[str, str]) -> None:
        """`same`: what each of them has to have alike, by name."""
        self.ranks: Sequence[HostRanks] = [HostRanks(1 + host, name) for host in range(hosts)]
        self._same = dict(same)

    async def HoldRanks(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[pb.HoldRanksResponse]:
        """A host joins. Raises InvalidInput for one that is not expected, ConfigError for one that
        differs.
        """
        ranks = self._ranks_of(await first_word(requests))
        async with aclosing(ranks.hold(requests)) as orders:
            async for order in orders:
                yield order

    def _ranks_of(self, joined: pb.HostJoined) -> HostRanks:
        found = {one.host: one for one in self.ranks}.get(joined.host)
        if found is None:
            raise InvalidInput(
                "no ranks are expected on this host",
                seen=f"host {joined.host}",
                allowed=f"1 to {len(self.ranks)}",
            )
        check_same(joined.host, self._same, dict(joined.same), "ranks")
        return found
