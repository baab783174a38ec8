"""The worker process: it serves one engine over one socket, by commands and events.

The process receives commands between rounds and sends at most one TokensEmitted per round. It never
waits while the engine has work; otherwise it sleeps on the socket.
"""

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from paceline.errors import InternalError, InvalidInput, PacelineError
from paceline.local.processes import die_with_parent
from paceline.messages import versions_from_proto, versions_to_proto
from paceline.plugins import import_object
from paceline.processor import keep_freed_memory
from paceline.services.rollout_gateway.engines import base, find_engine, nouns
from paceline.services.rollout_gateway.engines.worker import SOCKET_VARIABLE, WorkerSpec, wire
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.v1 import engine_pb2 as pb

PARENT_CHECK_MS = 1000
FAULTS_UNTIL_BROKEN = 3


Emit = Callable[[Sequence[nouns.Chunk]], object]
"""Receives chunks for the next TokensEmitted."""


def answer(
    engine: base.CommandedEngine,
    command: pb.WorkerCommand,
    emit: Emit,
    caught: type[Exception] = PacelineError,
) -> pb.WorkerEvent | None:
    """Executes a command; returns its answer, or a failure event if it failed.

    Returns None for commands without an answer or a number. After Shutdown, the caller ends its
    loop.
    """
    try:
        event = _carry_out(engine, command, emit)
    except base.EngineBroken:
        raise
    except caught as error:
        if not isinstance(error, PacelineError):
            error = InternalError(f"{type(error).__name__}: {error}")
        event = pb.WorkerEvent(failed=wire.failed_to(error))
    if event is None or not command.command_id:
        return None
    event.command_id = command.command_id
    return event


_CHANGES: dict[str, Callable[[base.CommandedEngine, Any], Sequence[nouns.Chunk] | None]] = {
    "pause": lambda engine, asked: engine.pause(wire.noun_of(wire.PAUSE_MODES, asked.mode)),
    "continue": lambda engine, _: engine.resume(),
    "prepare_weights": lambda engine, asked: engine.prepare_weights(
        wire.noun_of(wire.TARGETS, asked.target), asked.version, Path(asked.path), asked.profile
    ),
    "commit_weights": lambda engine, asked: engine.commit_weights(
        versions_from_proto(asked.versions), wire.noun_of(wire.PAUSE_MODES, asked.mode)
    ),
    "abort_weights": lambda engine, asked: engine.abort_weights(
        wire.noun_of(wire.TARGETS, asked.target), asked.version
    ),
    "set_speculation": lambda engine, asked: engine.force_arm(asked.forced_arm),
    "learn_arms": lambda engine, asked: engine.learn_arms(asked.arms),
    "quarantine": lambda engine, asked: engine.quarantine(asked),
    "resume_memory": lambda engine, _: engine.resume_memory(),
    "flush_cache": lambda engine, _: engine.flush_cache(),
    "shutdown": lambda engine, _: engine.abort(None),
}
"""Commands that are answered once they are done. They return the chunks of requests that they
ended.
"""


def _carry_out(
    engine: base.CommandedEngine, command: pb.WorkerCommand, emit: Emit
) -> pb.WorkerEvent | None:
    match command.WhichOneof("command"):
        case "enqueue":
            for message in command.enqueue.requests:
                emit(_enqueue(engine, message))
        case "abort":
            emit(engine.abort(frozenset(command.abort.request_ids) or None))
        case "get_health":
            health = engine.load
            health.versions.CopyFrom(versions_to_proto(engine.versions))
            return pb.WorkerEvent(health=health)
        case "release_memory":
            return pb.WorkerEvent(done=pb.CommandDone(released_bytes=engine.release_memory()))
        case name if name in _CHANGES:
            emit(_CHANGES[name](engine, getattr(command, name)) or ())
            return pb.WorkerEvent(done=pb.CommandDone())
        case unknown:
            raise InvalidInput("unknown command", seen=unknown, allowed=", ".join(_CHANGES))
    return None


def _enqueue(engine: base.CommandedEngine, message: pb.EngineRequest) -> Sequence[nouns.Chunk]:
    """Queues a request; returns its last chunk if the engine refuses it."""
    try:
        engine.enqueue(wire.request_from(message))
    except PacelineError as error:
        # The gateway handles errors by their class, and an error's own reason may be narrower.
        refused = f"{type(error).reason}: {error}"
        ended = nouns.Finish.ERROR
        return [nouns.Chunk(message.request_id, (), (), (), finish=ended, error=refused)]
    return ()


SEND_DEADLINE_MS = 30_000
LINGER_MS = 2000


class Peer:
    """Owns the socket, at the address in SOCKET_VARIABLE; the caller owns the engine."""

    def __init__(self, ring: RowRing | None = None) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_DEADLINE_MS)
        self._socket.setsockopt(zmq.SNDHWM, 10_000)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(os.environ[SOCKET_VARIABLE])
        self._ring = ring
        self._rows_reported = ring.rows_written if ring else 0
        self.chunks: list[nouns.Chunk] = []

    def poll(self, wait_ms: int, others: Sequence[Any] = ()) -> bool:
        """True if a command, or a message on another socket, arrived within `wait_ms`."""
        if not others:
            return bool(self._socket.poll(wait_ms))
        poller = zmq.Poller()
        for socket in (self._socket, *others):
            poller.register(socket, zmq.POLLIN)
        return bool(poller.poll(wait_ms))

    def receive(self) -> bytes:
        """Waits for the next command and returns it."""
        return self._socket.recv()

    def send(self, event: pb.WorkerEvent) -> None:
        """Send one event.

        Raises zmq.Again if the gateway has accepted nothing for SEND_DEADLINE_MS.
        """
        self._socket.send(event.SerializeToString())

    def fail(self, error: PacelineError) -> None:
        """Report why no engine could be built."""
        self.send(pb.WorkerEvent(failed=wire.failed_to(error)))

    def execute(
        self,
        engine: base.CommandedEngine,
        command: pb.WorkerCommand,
        caught: type[Exception] = PacelineError,
    ) -> None:
        """Execute a command and answer it; exceptions other than `caught` are raised."""
        event = answer(engine, command, self.chunks.extend, caught)
        if event is not None:
            if self._ring is not None and event.HasField("health"):
                health = event.health
                health.rows_dropped = max(health.rows_dropped, self._ring.rows_dropped)
            self.send(event)

    def flush(self, can_send: Callable[[nouns.Chunk], bool] = lambda _: True) -> None:
        """Send the collected chunks. Without chunks, it reports rows only when they fill an eighth
        of the ring.

        `can_send` delays the last chunk of a request until its rows have reached the ring.
        """
        ring = self._ring
        ready: list[nouns.Chunk] = []
        held: list[nouns.Chunk] = []
        for chunk in self.chunks:
            (ready if can_send(chunk) else held).append(chunk)
        unread = ring.rows_written - self._rows_reported if ring else 0
        if not ready and (ring is None or unread < max(ring.capacity // 8, 1)):
            return
        self.chunks[:] = held
        tokens = pb.TokensEmitted(chunks=[wire.chunk_to(chunk) for chunk in ready])
        if ring is not None:
            self._rows_reported = tokens.rows_written = ring.rows_written
            tokens.rows_dropped = ring.rows_dropped
        self.send(pb.WorkerEvent(tokens=tokens))

    def close(self) -> None:
        """Send queued messages, within LINGER_MS at most."""
        self._socket.close()
        self._context.term()


class Worker:
    """The command loop of one engine."""

    def __init__(self, engine: base.Engine, peer: Peer, worker_index: int) -> None:
        self._engine = engine
        self._peer = peer
        self._index = worker_index
        self._parent = os.getppid()
        self._faults = 0
        self._stopping = False

    def run(self) -> None:
        """Serve until Shutdown or the parent's death.

        Raises base.EngineBroken.
        """
        engine = self._engine
        ready = wire.ready_to(engine.info, self._index, engine.versions, engine.lm_head_hash)
        self._peer.send(pb.WorkerEvent(ready=ready))
        while not self._stopping:
            self._execute_commands()
            if engine.has_work and not self._stopping:
                self._round()
            self._peer.flush()
        engine.close()

    def _execute_commands(self) -> None:
        """Execute all waiting commands. It sleeps until the first command only if the engine has no
        work.
        """
        while not self._stopping:
            wait_ms = 0 if self._engine.has_work or self._peer.chunks else PARENT_CHECK_MS
            if self._peer.poll(wait_ms):
                command = pb.WorkerCommand.FromString(self._peer.receive())
                # Any fault of the engine is returned as the answer to the command.
                self._peer.execute(self._engine, command, caught=Exception)
                self._stopping = command.HasField("shutdown")
            else:
                self._stopping = os.getppid() != self._parent
                if wait_ms == 0:
                    return

    def _round(self) -> None:
        try:
            self._peer.chunks += self._engine.step()
            self._faults = 0
        except Exception as error:
            self._faults += 1
            text = f"{type(error).__name__}: {error}"
            for chunk in self._engine.abort(None):
                last = dataclasses.replace(chunk, finish=nouns.Finish.ERROR, error=text)
                self._peer.chunks.append(last)
            if self._faults >= FAULTS_UNTIL_BROKEN:
                self._peer.flush()
                raise base.EngineBroken(text) from error


def begin() -> WorkerSpec:
    """Ties this process to its parent and reads its spec."""
    die_with_parent()
    keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A signal may reach the whole process group; the gateway decides when workers end.
        signal.signal(number, signal.SIG_IGN)
    return WorkerSpec.read()


def main() -> int:
    """Process entry. Returns 0 after Shutdown, 1 if the engine is broken, 2 for wrong settings."""
    spec = begin()
    if spec.cores:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, set(spec.cores) & allowed or allowed)
    ring = RowRing.attach(Path(spec.ring_path)) if spec.ring_path else None
    peer = Peer(ring)
    started = time.monotonic()
    try:
        kind = find_engine(spec.kind)
        settings = import_object(kind.settings).model_validate(spec.engine)
        engine: base.Engine = import_object(kind.build)(settings, ring)
        Worker(engine, peer, spec.worker_index).run()
    except PacelineError as error:
        peer.fail(error)
        return 2
    except base.EngineBroken as error:
        lived = time.monotonic() - started
        print(f"worker {spec.worker_index}: broken after {lived:.1f} s: {error}", file=sys.stderr)
        return 1
    finally:
        peer.close()

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
