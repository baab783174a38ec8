"""Ends the leases of a coordinator that is gone for good, so that its workers serve again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError
from paceline.local.news import tell_supervisor
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.workers.lending import Lending
from paceline.telemetry import get_logger

log = get_logger(__name__)


class Expiry:
    """Returns lent workers when no coordinator has listened for as long as their lease may outlast
    it. For use on one event loop.
    """

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self._listeners = 1  # no coordinator can listen before `start`
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        lending.on_lent = self.renew

    def start(self) -> None:
        """Coordinators can listen from now on."""
        self._listeners -= 1
        self.renew()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block the coordinator is connected, and no lease expires."""
        self._listeners += 1
        self.renew()
        try:
            yield
        finally:
            self._listeners -= 1
            self.renew()

    def renew(self) -> None:
        """Restart the timer; it runs while workers are lent and no coordinator listens."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lending.outlasts_s is not None and not self._listeners:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._lending.outlasts_s, self._expire)

    async def stop(self) -> None:
        """Stop expiry for good."""
        self._listeners += 1
        self.renew()
        await cancel(self._ending)

    def _expire(self) -> None:
        self._ending = background(self._end(), "expiry of leases")

    async def _end(self) -> None:
        after_s = self._lending.outlasts_s
        try:
            back = await self._lending.expire(lambda: not self._listeners)
        except PacelineError as error:
            log.error("expired leases cannot be ended", error=str(error))
            self.renew()
            return
        if back:
            what = f"workers {back} serve again: their coordinator is gone for {after_s:g} s"
            log.warning("leases have expired", workers=back, after_s=after_s)
            tell_supervisor("recovered", what)
