"""Listens to ranks, starts them again when one is lost, and serves while they take commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.ranks.group import RankGroup
from paceline.rpc import Server
from paceline.telemetry import get_logger

_RESTARTS = 5
_BACKOFF_S = 0.5
_IDLE_S = 3600.0
_log = get_logger(__name__)


class WatchedRanks:
    """A RankGroup under supervision; `supervise` must be running.

    `on_start` prepares every newly started group before it takes commands, `on_message` takes what
    any rank says from then on, `on_lost` hears of a loss before the restart begins.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        start_deadline_s: float,
        on_start: Callable[[RankGroup], Awaitable[None]],
        on_message: Callable[[int, bytes], None],
        on_lost: Callable[[PacelineError], None],
    ) -> None:
        self._group = group
        self._start_deadline_s = start_deadline_s
        self._on_start, self._on_message, self._on_lost = on_start, on_message, on_lost
        self._ready, self._down = asyncio.Event(), asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        return self._group.pids

    @property
    def ready(self) -> bool:
        """Whether the ranks take commands."""
        return self._ready.is_set()

    async def supervise(self) -> None:
        """Starts the ranks, and starts them again when one is lost.

        Raises what the first start raised, or the last one after several in a row.
        """
        failures, ever_ready = 0, False
        while True:
            try:
                await self._group.start(self._start_deadline_s)
                await self._on_start(self._group)
                self._down.clear()
                self._ready.set()
                failures, ever_ready = 0, True
                await self._listen()
            except PacelineError as error:
                failures += 1
                self._ready.clear()
                self._down.set()
                self._on_lost(error)
                await self._group.stop(0.0)
                if failures > _RESTARTS or not ever_ready:
                    raise
                _log.error(
                    "ranks lost; they are started again", error=str(error), failures=failures
                )
                await asyncio.sleep(_BACKOFF_S * failures)

    async def wait_ready(self, deadline_s: float) -> None:
        """Waits until the ranks take commands; Unavailable when they do not in time."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._ready.wait()
        except TimeoutError as error:
            raise Unavailable(
                "the ranks are not ready", seen=f"{deadline_s} s", reason="RANK_LOST"
            ) from error

    @asynccontextmanager
    async def served(
        self, server: Server, service: str, stop: asyncio.Event, grace_s: float
    ) -> AsyncIterator[None]:
        """Starts server and ranks and waits for `stop`; the body runs while the ranks still do.

        Raises what the first start of the ranks raised. Afterwards no rank is left.
        """
        server.set_serving(service, False)
        await server.start()
        supervision = asyncio.create_task(self.supervise())
        health = asyncio.create_task(self._show_health(server, service))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({supervision, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if supervision.done():
                await supervision
            yield
        finally:
            for task in (health, stopped, supervision):
                task.cancel()
            await asyncio.gather(health, stopped, supervision, return_exceptions=True)
            await self.stop(grace_s)
            await server.stop(0)

    async def _show_health(self, server: Server, service: str) -> None:
        """For ever: the service serves while the ranks take commands."""
        while True:
            await self._ready.wait()
            server.set_serving(service, True)
            await self._down.wait()
            server.set_serving(service, False)

    async def send(self, message: bytes) -> None:
        """One message to every rank. Raises RankLost when one is gone."""
        await self._group.send(message)

    def kill(self) -> None:
        """SIGKILL every rank; supervision starts them again."""
        self._group.kill()

    async def stop(self, grace_s: float) -> None:
        """Ends all ranks; cancel `supervise` first."""
        await self._group.stop(grace_s)

    async def _listen(self) -> None:
        """Takes messages for ever; ends with RankLost."""
        while True:
            try:
                rank, data = await self._group.receive(_IDLE_S)
            except DeadlineExceeded:
                continue
            self._on_message(rank, data)
