"""Runs one engine worker: a process, its socket, its ring."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from paceline.errors import DeadlineExceeded, Unavailable
from paceline.local.forking import Forked, Forker
from paceline.local.heartbeat import LIMIT_S, Heartbeat
from paceline.local.processes import describe_exit
from paceline.messages import versions_from_proto
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, RowRing
from paceline.services.rollout_gateway.engines.worker.spec import (
    SOCKET_VARIABLE,
    SPEC_VARIABLE,
    WorkerSpec,
)
from paceline.services.rollout_gateway.workers.socket import WorkerSocket
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb

STOP_GRACE_S = 5.0
LAST_WORDS_S = 0.02
LAST_WORDS = 1000
OnTokens = Callable[[pb.TokensEmitted, RowArray | None], None]
_numbers = itertools.count(1)
log = get_logger(__name__)


class WorkerProcess:
    """One life of one worker. Not reused: a restart makes another."""

    def __init__(
        self,
        spec: WorkerSpec,
        forker: Forker,
        ring: RowRing | None,
        directory: Path,
        on_tokens: OnTokens,
        heartbeat_s: float = LIMIT_S,
    ) -> None:
        self.index = spec.worker_index
        self.ready = pb.WorkerReady()
        self.versions = VersionSet()  # that it serves
        # (target, version, profile) loaded beside the serving set
        self.prepared: set[tuple[int, int, str]] = set()
        self._spec = spec
        self._forker = forker
        self._ring = ring
        self._directory = directory
        self._on_tokens = on_tokens
        self._heartbeat = Heartbeat(heartbeat_s)
        self._answers: dict[int, asyncio.Future[pb.WorkerEvent]] = {}
        self._ready: asyncio.Future[pb.WorkerReady] = asyncio.get_running_loop().create_future()
        self._process: Forked | None = None
        self._watching: asyncio.Task[None] | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def forget(self, target: int, version: int) -> None:
        """It has a version no longer beside the serving set."""
        self.prepared = {one for one in self.prepared if one[:2] != (target, version)}

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def unanswered(self) -> int:
        """Commands that it has not answered yet."""
        return len(self._answers)

    async def start(self, context: zmq.Context[Any], deadline_s: float) -> None:
        """Spawn and wait until it serves.

        Raises ConfigError when its settings are refused, Unavailable when it dies,
        DeadlineExceeded.
        """
        name = f"{self.index}-{next(_numbers)}"
        spec_path, address = self._directory / f"{name}.json", f"ipc://{self._directory / name}"
        self._spec.write(spec_path)
        self._socket = WorkerSocket(context, address, self._take)
        libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {
            **self._heartbeat.environment,
            **dict.fromkeys(libraries, str(self._spec.threads)),
            SPEC_VARIABLE: str(spec_path),
            SOCKET_VARIABLE: address,
        }
        module = find_engine(self._spec.kind).process
        self._process = await self._forker.fork(module, environment, None, deadline_s)
        self._watching = background(self._watch(self._process), f"watch of worker {self.index}")
        await self._become_ready(deadline_s)

    async def _become_ready(self, deadline_s: float) -> None:
        done, _ = await asyncio.wait(
            (self._ready, self.lost), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._ready in done:
            self.ready = self._ready.result()
            self.versions = versions_from_proto(self.ready.versions)
        elif self.lost in done:
            raise Unavailable(
                f"engine worker {self.index} ended before it was ready", seen=self.lost.result()
            )
        else:
            raise DeadlineExceeded(
                f"engine worker {self.index} is not ready", seen=f"{deadline_s} s"
            )

    def send(self, command: pb.WorkerCommand) -> None:
        """Send without waiting for an answer."""
        self._socket.send(command.SerializeToString())

    async def ask(self, command: pb.WorkerCommand, deadline_s: float) -> pb.WorkerEvent:
        """Send and wait for the answer.

        Raises what CommandFailed says, Unavailable on loss, DeadlineExceeded.
        """
        if self.lost.done():
            raise Unavailable(f"engine worker {self.index} is lost", seen=self.lost.result())
        command.command_id = next(_numbers)
        answer: asyncio.Future[pb.WorkerEvent] = asyncio.get_running_loop().create_future()
        self._answers[command.command_id] = answer
        self.send(command)
        try:
            await asyncio.wait(
                (answer, self.lost), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
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

    async def stop(self) -> None:
        """Shutdown, then kill after STOP_GRACE_S; frees socket and ring."""
        if self._process is not None and not self.lost.done():
            self._heartbeat.expect_end()
            self.send(pb.WorkerCommand(shutdown=pb.Shutdown()))
            await asyncio.wait((self.lost,), timeout=STOP_GRACE_S)
        await self.close()

    async def close(self) -> None:
        """Kill what still runs and free socket and ring."""
        self.kill()
        if self._process is not None:
            with suppress(TimeoutError):  # who would tell of its end may be stopped
                async with asyncio.timeout(STOP_GRACE_S):
                    await self._process.wait()
        await cancel(self._watching)
        self._heartbeat.close()
        self._socket.close()
        if self._ring is not None:
            self._ring.seal()

    def kill(self) -> None:
        """End the process at once; `lost` follows."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _take(self, message: bytes) -> None:
        """One event. What goes wrong with it ends the worker, which unheard would hold its requests
        for ever.
        """
        try:
            self._heard(pb.WorkerEvent.FromString(message))
        except Exception as error:
            log.error("a worker's event is not taken", worker=self.index, exc_info=error)
            self.kill()

    def _heard(self, event: pb.WorkerEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "tokens":
            rows = self._ring.read(event.tokens.rows_written) if self._ring is not None else None
            self._on_tokens(event.tokens, rows)
        elif kind == "ready":
            if self._ring is not None:
                self._ring.seal()
            self._ready.set_result(event.ready)
        elif kind == "failed" and not event.command_id and not self._ready.done():
            self._ready.set_exception(
                wire.error_from(event.failed, f"engine worker {self.index}: ")
            )
        elif (answer := self._answers.get(event.command_id)) is not None and not answer.done():
            answer.set_result(event)

    async def _watch(self, process: Forked) -> None:
        code = await self._heartbeat.outlived(process)
        for _ in range(LAST_WORDS):  # what it said before it ended is read first
            before = self._socket.received
            await asyncio.sleep(LAST_WORDS_S)
            self._socket.read()
            if self._socket.received == before:
                break
        self.lost.set_result(describe_exit(code) + self._heartbeat.verdict)
