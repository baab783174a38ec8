"""Client of one engine worker: its commands and answers, its version set, its loss."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from math import inf
from typing import Any

from paceline.errors import DeadlineExceeded, Unavailable
from paceline.local.work import WorkClock
from paceline.messages import versions_from_proto
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.engines.worker.ring import RowArray
from paceline.services.rollout_gateway.workers.local import STOP_GRACE_S, LocalWorker
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb

OnTokens = Callable[[pb.TokensEmitted, RowArray | None], None]
_numbers = itertools.count(1)


class WorkerProcess:
    """One process of one worker. A restart makes a new object."""

    def __init__(self, index: int, life: LocalWorker, on_tokens: OnTokens) -> None:
        self.index = index
        self.ready = pb.WorkerReady()
        self.versions = VersionSet()  # served by the worker
        # (target, version, profile) loaded beside the serving set
        self.prepared: set[tuple[int, int, str]] = set()
        self._life = life
        self._on_tokens = on_tokens
        self._answers: dict[int, asyncio.Future[pb.WorkerEvent]] = {}
        self._ready: asyncio.Future[pb.WorkerReady] = asyncio.get_running_loop().create_future()
        self._clocks: list[WorkClock] = []  # of the unanswered commands
        self.lost = life.ended

    def forget(self, target: int, version: int) -> None:
        """The worker no longer holds a version beside the serving set."""
        self.prepared = {one for one in self.prepared if one[:2] != (target, version)}

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._life.pid

    @property
    def unanswered(self) -> int:
        """Number of unanswered commands."""
        return len(self._answers)

    @property
    def still_s(self) -> float:
        """Seconds that count (WorkClock) since the newest unanswered command; infinite without
        any.
        """
        return min((clock.counted_s for clock in self._clocks), default=inf)

    async def start(self, deadline_s: float) -> None:
        """Start the process and wait until it serves. `deadline_s` counts the worker's CPU time
        (WorkClock).

        Raises ConfigError when the worker refuses its settings, Unavailable when it dies,
        DeadlineExceeded.
        """
        await self._life.start(self._heard, deadline_s)
        await self._become_ready(deadline_s)

    async def _become_ready(self, deadline_s: float) -> None:
        await self._clock().wait((self._ready, self.lost), deadline_s)
        if self._ready.done():
            self.ready = self._ready.result()
            self.versions = versions_from_proto(self.ready.versions)
        elif self.lost.done():
            raise Unavailable(
                f"engine worker {self.index} ended before it was ready", seen=self.lost.result()
            )
        else:
            raise DeadlineExceeded(
                f"engine worker {self.index} is not ready", seen=f"{deadline_s} s"
            )

    def send(self, command: pb.WorkerCommand) -> None:
        """Send without waiting for an answer."""
        self._life.send(command.SerializeToString())

    async def ask(self, command: pb.WorkerCommand, deadline_s: float) -> pb.WorkerEvent:
        """Send a command and wait for its answer. `deadline_s` counts the worker's CPU time
        (WorkClock). For GetHealth it is wall time, because that command has to reveal a silent
        worker.

        Raises the error of CommandFailed, Unavailable on loss, DeadlineExceeded.
        """
        if self.lost.done():
            raise Unavailable(f"engine worker {self.index} is lost", seen=self.lost.result())
        command.command_id = next(_numbers)
        answer: asyncio.Future[pb.WorkerEvent] = asyncio.get_running_loop().create_future()
        self._answers[command.command_id] = answer
        self.send(command)
        try:
            await self._awaited(command, (answer, self.lost), deadline_s)
        finally:
            del self._answers[command.command_id]

        if not answer.done():
            if self.lost.done():
                raise Unavailable(f"engine worker {self.index} was lost", seen=self.lost.result())
            kind = command.WhichOneof("command")
            raise DeadlineExceeded(
                f"engine worker {self.index} did not answer {kind}", seen=f"{deadline_s} s"
            )

        event = answer.result()
        if event.HasField("failed"):
            raise wire.error_from(event.failed, f"engine worker {self.index}: ")
        return event

    async def _awaited(
        self, command: pb.WorkerCommand, futures: tuple[asyncio.Future[Any], ...], deadline_s: float
    ) -> None:
        """Return when one of the futures is done, or at the deadline."""
        if command.HasField("get_health"):
            await asyncio.wait(futures, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            return
        clock = self._clock()
        self._clocks.append(clock)
        try:
            await clock.wait(futures, deadline_s)
        finally:
            self._clocks.remove(clock)

    def _clock(self) -> WorkClock:
        return WorkClock(lambda: [self.pid] if self.pid else [])

    async def stop(self) -> None:
        """Shut down, then kill after STOP_GRACE_S; frees the worker's resources."""
        if self.pid and not self.lost.done():
            self._life.expect_end()
            self.send(pb.WorkerCommand(shutdown=pb.Shutdown()))
            await asyncio.wait((self.lost,), timeout=STOP_GRACE_S)
        await self.close()

    async def close(self) -> None:
        """Kill the process if it still runs, and free the worker's resources."""
        await self._life.close()

    def kill(self) -> None:
        """Kill the process at once; `lost` follows."""
        self._life.kill()

    def _heard(self, event: pb.WorkerEvent, rows: RowArray | None) -> None:
        kind = event.WhichOneof("event")
        if kind == "tokens":
            self._on_tokens(event.tokens, rows)
        elif kind == "ready":
            self._ready.set_result(event.ready)
        elif kind == "failed" and not event.command_id and not self._ready.done():
            self._ready.set_exception(
                wire.error_from(event.failed, f"engine worker {self.index}: ")
            )
        elif (answer := self._answers.get(event.command_id)) is not None and not answer.done():
            answer.set_result(event)
