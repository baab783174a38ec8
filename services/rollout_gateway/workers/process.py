"""One process of an engine worker: its start, commands and answers, version set, loss and end."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import zmq

from paceline.errors import DeadlineExceeded, Unavailable
from paceline.local import forking, patience
from paceline.local.child import LIMIT_S, Child, ChildSocket
from paceline.messages import versions_from_proto
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.engines import find_engine, worker
from paceline.services.rollout_gateway.engines.nouns import Capability
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, RowRing
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb

ANSWER_S = 60.0
"""Default deadline of an answer in seconds, counted by the worker's CPU time (WorkClock)."""
OnTokens = Callable[[pb.TokensEmitted, RowArray | None], None]
"""Takes tokens and their hidden rows; None when no consumer reads rows."""
STOP_GRACE_S = 5.0
LAST_WORDS_S = 0.02
LAST_WORDS = 1000
_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_numbers = itertools.count(1)
log = get_logger(__name__)


@dataclass(eq=False, repr=False)
class WorkerProcess:
    """One process of one worker, with its socket and ring. A restart makes a new object."""

    _spec: worker.WorkerSpec
    _forker: forking.Forker
    _ring: RowRing | None
    _directory: Path  # for the spec's file and the socket
    _context: zmq.Context[Any]
    _on_tokens: OnTokens
    _heartbeat_s: float = LIMIT_S  # maximum stop
    ready: pb.WorkerReady = field(default_factory=pb.WorkerReady)
    versions: VersionSet = field(default_factory=VersionSet)  # served by the worker
    prepared: set[tuple[int, int, str]] = field(default_factory=set)
    """(target, version, profile) loaded beside the serving set."""
    _child: Child | None = None
    _socket: ChildSocket | None = None
    _watching: asyncio.Task[None] | None = None
    _answers: dict[int, asyncio.Future[pb.WorkerEvent]] = field(default_factory=dict)
    _clocks: list[patience.WorkClock] = field(default_factory=list)  # of the unanswered commands

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.index, self.name = self._spec.worker_index, f"engine worker {self._spec.worker_index}"
        self.lost: asyncio.Future[str] = loop.create_future()
        """Description of the process's end, set once it has ended."""
        self._ready: asyncio.Future[pb.WorkerReady] = loop.create_future()

    def forget(self, target: int, version: int) -> None:
        """The worker no longer holds a version beside the serving set."""
        self.prepared = {one for one in self.prepared if one[:2] != (target, version)}

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._child.pid if self._child else 0

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
        name = f"{self.index}-{next(_numbers)}"
        spec_path, address = self._directory / f"{name}.json", f"ipc://{self._directory / name}"
        self._spec.write(spec_path)
        self._socket = socket = ChildSocket(self._context, address, self._take)
        environment = {
            **dict.fromkeys(_LIBRARIES, str(self._spec.threads or len(self._spec.cores))),
            worker.SPEC_VARIABLE: str(spec_path),
            worker.SOCKET_VARIABLE: address,
        }
        module, about = find_engine(self._spec.kind).process, (environment, None, deadline_s)
        fork = self._forker.fork(module, *about, stop_s=self._heartbeat_s, tree=True)
        self._child = child = await fork
        self._watching = background(self._watch(child, socket), f"watch of worker {self.index}")
        await self._clock().wait((self._ready, self.lost), deadline_s)
        if self._ready.done():
            self.ready = self._ready.result()
            self.versions = versions_from_proto(self.ready.versions)
        elif self.lost.done():
            raise Unavailable(f"{self.name} ended before it was ready", seen=self.lost.result())
        else:
            raise DeadlineExceeded(f"{self.name} is not ready", seen=f"{deadline_s} s")

    def send(self, command: pb.WorkerCommand) -> None:
        """Send without waiting for an answer; commands to a lost process are dropped."""
        if self._socket is not None:
            self._socket.send(command.SerializeToString())

    async def ask(self, command: pb.WorkerCommand, deadline_s: float = ANSWER_S) -> pb.WorkerEvent:
        """Send a command and wait for its answer. `deadline_s` counts the worker's CPU time
        (WorkClock). For GetHealth it is wall time, because that command has to reveal a silent
        worker.

        Raises the error of CommandFailed, Unavailable on loss, DeadlineExceeded.
        """
        self.require_alive()
        command.command_id = next(_numbers)
        answer: asyncio.Future[pb.WorkerEvent] = asyncio.get_running_loop().create_future()
        self._answers[command.command_id] = answer
        self.send(command)
        futures, clock = (answer, self.lost), self._clock()
        try:
            if command.HasField("get_health"):
                await asyncio.wait(futures, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                self._clocks.append(clock)
                await clock.wait(futures, deadline_s)
        finally:
            del self._answers[command.command_id]
            self._clocks = [one for one in self._clocks if one is not clock]

        if not answer.done():
            self.require_alive()
            kind = command.WhichOneof("command")
            raise DeadlineExceeded(f"{self.name} did not answer {kind}", seen=f"{deadline_s} s")
        event = answer.result()
        if event.HasField("failed"):
            raise wire.error_from(event.failed, f"{self.name}: ")
        return event

    def require_alive(self) -> None:
        """Raises Unavailable once the process has ended."""
        if self.lost.done():
            raise Unavailable(f"{self.name} was lost", seen=self.lost.result())

    async def release_memory(self) -> int:
        """Have the worker release its memory; returns the bytes, 0 if the engine cannot release
        memory. Raises the errors of `ask`.
        """
        if Capability.RELEASE_MEMORY not in self.ready.capabilities:
            return 0
        command = pb.WorkerCommand(release_memory=pb.ReleaseMemory())
        return (await self.ask(command)).done.released_bytes

    async def restore_memory(self) -> None:
        """Have the worker restore its memory. Raises the errors of `ask`."""
        if Capability.RELEASE_MEMORY in self.ready.capabilities:
            await self.ask(pb.WorkerCommand(resume_memory=pb.ResumeMemory()))

    async def replace(self) -> None:
        """Kill the process and wait for its end, so that no request is sent to it. Its keeper
        starts another process.
        """
        self.kill()
        await asyncio.shield(self.lost)

    def _clock(self) -> patience.WorkClock:
        return patience.WorkClock(lambda: [self.pid] if self.pid else [])

    async def stop(self) -> None:
        """Shut down, then kill after STOP_GRACE_S; frees the worker's resources."""
        if self.pid and not self.lost.done():
            self.send(pb.WorkerCommand(shutdown=pb.Shutdown()))
            await asyncio.wait((self.lost,), timeout=STOP_GRACE_S)
        await self.close()

    async def close(self) -> None:
        """Kill the process if it still runs, and free its socket and ring."""
        if self._child is not None:
            await self._child.stop()
        await cancel(self._watching)
        if self._socket is not None:
            self._socket.close()
        if self._ring is not None:
            self._ring.seal()

    def kill(self) -> None:
        """Kill the process at once; `lost` follows."""
        if self._child is not None:
            self._child.kill()

    async def _watch(self, child: Child, socket: ChildSocket) -> None:
        await child.wait()
        for _ in range(LAST_WORDS):  # read the process's last messages first
            before = socket.received
            await asyncio.sleep(LAST_WORDS_S)
            socket.read()
            if socket.received == before:
                break
        self.lost.set_result(child.last_words())

    def _take(self, message: bytes) -> None:
        # An event that raises ends the worker. Otherwise its requests would wait for ever.
        try:
            event, rows = pb.WorkerEvent.FromString(message), None
            if self._ring is not None and event.HasField("tokens"):
                rows = self._ring.read(event.tokens.rows_written)
            elif self._ring is not None and event.HasField("ready"):
                self._ring.seal()
            kind = event.WhichOneof("event")
            if kind == "tokens":
                self._on_tokens(event.tokens, rows)
            elif kind == "ready":
                self._ready.set_result(event.ready)
            elif kind == "failed" and not event.command_id and not self._ready.done():
                self._ready.set_exception(wire.error_from(event.failed, f"{self.name}: "))
            elif (answer := self._answers.get(event.command_id)) is not None and not answer.done():
                answer.set_result(event)
        except Exception as error:
            log.error("a worker's event is not taken", worker=self.index, exc_info=error)
            self.kill()
