"""What the gateway needs of an engine worker's process, on whichever host that is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from paceline.services.rollout_gateway.engines.worker.ring import RowArray
from paceline.telemetry import get_logger
from paceline.v1 import engine_pb2 as pb

OnEvent = Callable[[pb.WorkerEvent, RowArray | None], None]
"""Takes an event, and the hidden rows that it tells of; None where no rows are wanted."""
log = get_logger(__name__)


class WorkerLife(Protocol):
    """One process of an engine worker: start, use, close."""

    ended: asyncio.Future[str]
    """How it has ended, in words, once it has."""

    @property
    def pid(self) -> int:
        """Process id on its host; 0 before the start."""
        ...

    @property
    def pid_here(self) -> int:
        """The same of a process on this host; 0 of one on another."""
        ...

    async def start(self, on_event: OnEvent, deadline_s: float) -> None:
        """Returns when the process runs; it tells by an event when it serves. Raises Unavailable,
        DeadlineExceeded.
        """
        ...

    def send(self, command: bytes) -> None:
        """Send without waiting; a process that is gone gets nothing."""
        ...

    def expect_end(self) -> None:
        """It has been told to end: from now on its silence means nothing."""
        ...

    def kill(self) -> None:
        """End it at once; `ended` follows."""
        ...

    async def close(self) -> None:
        """Kill what still runs and free what belongs to it."""
        ...


@contextmanager
def taken_or_killed(index: int, life: WorkerLife) -> Iterator[None]:
    """Around taking an event. What goes wrong with it ends the worker, which unheard would hold its
    requests for ever.
    """
    try:
        yield
    except Exception as error:
        log.error("a worker's event is not taken", worker=index, exc_info=error)
        life.kill()
