"""Links a trainer with its processes on other nodes, which keep its ranks there (hosting.py).

Such a process, a host, offers its node to the trainer by a call. The call lasts as long as the
ranks: the trainer orders their start, messages and stop, and the host returns their messages. At
the end of the call, by any cause, the host ends its ranks. Then it offers its node again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from paceline.errors import InvalidInput
from paceline.local.patience import patient
from paceline.v1.policy_pb2 import KeepRanksRequest, KeepRanksResponse

READY = b""
"""The message of a rank that accepts messages."""
_END_S = 5.0


@dataclass(slots=True)
class _Host:
    """One call of a host; its `orders` end with None."""

    node: int
    orders: asyncio.Queue[KeepRanksResponse | None] = field(default_factory=asyncio.Queue)
    keeps: bool = False  # the host's ranks are started and not stopped
    lost: str = ""
    left: asyncio.Event = field(default_factory=asyncio.Event)


class RankHosts:
    """The trainer's end: one host for each other node."""

    def __init__(
        self,
        nodes: Iterable[int],
        on_message: Callable[[int, bytes], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """`on_message` receives messages of running ranks (rank, payload); `on_lost` receives why
        the ranks of a node have ended.
        """
        self._nodes = set(nodes)
        self._hosts: dict[int, _Host] = {}
        self._offered = asyncio.Event()
        self._on_message, self._on_lost = on_message, on_lost

    async def orders(
        self, news: AsyncIterator[KeepRanksRequest], run_id: str
    ) -> AsyncGenerator[KeepRanksResponse]:
        """Serves the call of a host: yields the orders to its ranks. Raises InvalidInput for
        another run, or a node without ranks.
        """
        first = await anext(news, KeepRanksRequest())  # of no run, if the call ends
        if first.run_id != run_id or first.node not in self._nodes:
            seen, allowed = f"{first.run_id}, node {first.node}", f"{run_id}, one of {self._nodes}"
            raise InvalidInput("this trainer has no ranks there", seen=seen, allowed=allowed)
        host = _Host(first.node)
        if before := self._hosts.get(host.node):
            before.orders.put_nowait(None)
        self._hosts[host.node] = host
        self._offered.set()
        reading = asyncio.create_task(self._read(host, news))
        try:
            while (order := await host.orders.get()) is not None:
                yield order
        finally:
            reading.cancel()
            if self._hosts.get(host.node) is host:
                del self._hosts[host.node]
            host.left.set()
            if host.keeps:
                self._on_lost(host.lost or f"the process of node {host.node} is away")

    async def start(self, store: str) -> None:
        """Waits until each node is offered, and orders the start of its ranks."""
        while self._nodes - self._hosts.keys():
            self._offered.clear()
            await self._offered.wait()
        for host in self._hosts.values():
            host.keeps = True
            host.orders.put_nowait(KeepRanksResponse(start=store))

    def send(self, message: bytes) -> None:
        """Sends one message to each rank."""
        for host in self._hosts.values():
            host.orders.put_nowait(KeepRanksResponse(message=message))

    async def stop(self, grace_s: float) -> None:
        """Stops all started ranks within `grace_s` seconds. A host that does not respond stops them
        at the end of its call.
        """
        stopping = [host for host in self._hosts.values() if host.keeps]
        for host in stopping:
            host.keeps = False
            del self._hosts[host.node]
            host.orders.put_nowait(KeepRanksResponse(stop_s=grace_s))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s + patient(_END_S)):
                for host in stopping:
                    await host.left.wait()
        for host in stopping:
            host.orders.put_nowait(None)

    async def _read(self, host: _Host, news: AsyncIterator[KeepRanksRequest]) -> None:
        try:
            async for one in news:
                if one.lost:
                    host.lost = one.lost
                elif host.keeps:
                    self._on_message(one.rank, one.message)
        finally:
            host.orders.put_nowait(None)
