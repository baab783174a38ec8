"""Runs engine workers on this host, each with a process, a socket and a ring."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from paceline.local.extras import require_extra
from paceline.local.forking import Forked, Forker
from paceline.local.heartbeat import LIMIT_S, Heartbeat
from paceline.local.process_directory import socket_directory
from paceline.local.processes import core_numbers, describe_exit
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.engine_config import EngineConfig
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, RowRing
from paceline.services.rollout_gateway.engines.worker.spec import (
    SOCKET_VARIABLE,
    SPEC_VARIABLE,
    WorkerSpec,
)
from paceline.services.rollout_gateway.workers.socket import WorkerSocket
from paceline.telemetry import get_logger
from paceline.v1 import engine_pb2 as pb

OnEvent = Callable[[pb.WorkerEvent, RowArray | None], None]
"""Takes an event and its hidden rows; None when no consumer reads rows."""
STOP_GRACE_S = 5.0
LAST_WORDS_S = 0.02
LAST_WORDS = 1000
_numbers = itertools.count(1)
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Size of each worker's ring and the content of its rows."""

    rows: int
    layout: RowLayout
    value_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's hidden state."""
        return self.layout.width * self.value_bytes


class LocalWorker:
    """One process of an engine worker: start, send, close."""

    def __init__(
        self,
        spec: WorkerSpec,
        forker: Forker,
        ring: RowRing | None,
        directory: Path,
        context: zmq.Context[Any],
        heartbeat_s: float = LIMIT_S,
    ) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Description of the process's end, set once it has ended."""
        self._spec = spec
        self._forker = forker
        self._ring = ring
        self._directory = directory
        self._context = context
        self._heartbeat = Heartbeat(heartbeat_s)
        self._socket: WorkerSocket | None = None
        self._process: Forked | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    async def start(self, on_event: OnEvent, deadline_s: float) -> None:
        """Return when the process runs; a later event reports readiness. Raises Unavailable,
        DeadlineExceeded.
        """
        index = self._spec.worker_index
        self._on_event = on_event
        name = f"{index}-{next(_numbers)}"
        spec_path, address = self._directory / f"{name}.json", f"ipc://{self._directory / name}"
        self._spec.write(spec_path)
        self._socket = socket = WorkerSocket(self._context, address, self._take)
        libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {
            **self._heartbeat.environment,
            **dict.fromkeys(libraries, str(self._spec.threads or len(self._spec.cores))),
            SPEC_VARIABLE: str(spec_path),
            SOCKET_VARIABLE: address,
        }
        module = find_engine(self._spec.kind).process
        self._process = process = await self._forker.fork(module, environment, None, deadline_s)
        self._watching = background(self._watch(process, socket), f"watch of worker {index}")

    def send(self, command: bytes) -> None:
        """Send without waiting; commands to a lost process are dropped."""
        if self._socket is not None:
            self._socket.send(command)

    def expect_end(self) -> None:
        """Ignore silence from now on, because the process was ordered to end."""
        self._heartbeat.expect_end()

    def kill(self) -> None:
        """Ends the process at once; `ended` follows."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Kills the process if it still runs, and frees its socket and ring."""
        self.kill()
        if self._process is not None:
            with suppress(TimeoutError):  # the forker that reports the end may be stopped
                async with asyncio.timeout(STOP_GRACE_S):
                    await self._process.wait()
        await cancel(self._watching)
        self._heartbeat.close()
        if self._socket is not None:
            self._socket.close()
        if self._ring is not None:
            self._ring.seal()

    def _take(self, message: bytes) -> None:
        # An event that raises ends the worker. Otherwise its requests would wait for ever.
        try:
            event, rows = pb.WorkerEvent.FromString(message), None
            if self._ring is not None and event.HasField("tokens"):
                rows = self._ring.read(event.tokens.rows_written)
            elif self._ring is not None and event.HasField("ready"):
                self._ring.seal()
            self._on_event(event, rows)
        except Exception as error:
            log.error(
                "a worker's event is not taken", worker=self._spec.worker_index, exc_info=error
            )
            self.kill()

    async def _watch(self, process: Forked, socket: WorkerSocket) -> None:
        code = await self._heartbeat.outlived(process)
        for _ in range(LAST_WORDS):  # read the process's last messages first
            before = socket.received
            await asyncio.sleep(LAST_WORDS_S)
            socket.read()
            if socket.received == before:
                break
        self.ended.set_result(describe_exit(code) + self._heartbeat.verdict)


def own_cores(index: int, count: int, threads: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Cores of one worker among a host's cores: one per thread. With `threads` 0, each of `count`
    workers gets an equal number. Workers share cores if there are too few.
    """
    each = min(threads or max(1, len(cores) // count), len(cores))
    return tuple(cores[(index * each + number) % len(cores)] for number in range(each))


class LocalWorkers:
    """Makes the workers of this host, each in its own place: make, close."""

    def __init__(
        self,
        config: EngineConfig,
        settings: dict[str, Any],
        rows: RowShape | None,
        heartbeat_s: float,
        count: int,
        forker: Forker | None = None,
    ) -> None:
        """`settings`: of the engine's own class. `rows`: None when no hidden states are needed.
        `count`: number of workers. `forker`: an already started forker of the engine's
        modules; `close` ends it.
        """
        self._config = config
        self._count = count
        self._settings = settings
        self._rows = rows
        self._heartbeat_s = heartbeat_s
        kind = find_engine(config.kind)
        if kind.extra:
            require_extra(kind.extra, f"gateway.engine.kind={config.kind}")
        self._forker = forker or Forker(kind.forked, None)
        self._directory: Path | None = None
        self._context: zmq.Context[Any] = zmq.Context()

    def make(self, index: int) -> LocalWorker:
        """Make a worker that has not started. Its index selects its cores and GPU."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="w-", dir=socket_directory()))
        rows = self._rows
        ring = RowRing.create(rows.rows, rows.row_bytes) if rows is not None else None
        config = self._config
        pinned = config.threads == 0
        spec = WorkerSpec(
            worker_index=index,
            kind=config.kind,
            threads=config.threads,
            cores=own_cores(index, self._count, config.threads, core_numbers()) if pinned else (),
            ring_path=str(ring.path) if ring is not None else "",
            engine=self._settings,
        )
        return LocalWorker(
            spec, self._forker, ring, self._directory, self._context, self._heartbeat_s
        )

    async def close(self) -> None:
        """End the forker and its remaining processes."""
        await self._forker.close()
        self._context.destroy(linger=0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
