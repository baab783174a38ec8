"""The worker's side of its socket: executes commands on the engine and sends events."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from paceline.errors import InternalError, InvalidInput, PacelineError
from paceline.messages import versions_from_proto, versions_to_proto
from paceline.services.rollout_gateway.engines.base import CommandedEngine
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish
from paceline.services.rollout_gateway.engines.worker import SOCKET_VARIABLE, wire
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.v1 import engine_pb2 as pb

Emit = Callable[[Sequence[Chunk]], object]
"""Receives chunks for the next TokensEmitted."""


def answer(
    engine: CommandedEngine,
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
    except caught as error:
        if not isinstance(error, PacelineError):
            error = InternalError(f"{type(error).__name__}: {error}")
        event = pb.WorkerEvent(failed=wire.failed_to(error))
    if event is None or not command.command_id:
        return None
    event.command_id = command.command_id
    return event


_CHANGES: dict[str, Callable[[CommandedEngine, Any], Sequence[Chunk] | None]] = {
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
    engine: CommandedEngine, command: pb.WorkerCommand, emit: Emit
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


def _enqueue(engine: CommandedEngine, message: pb.EngineRequest) -> Sequence[Chunk]:
    """Queues a request; returns its last chunk if the engine refuses it."""
    try:
        engine.enqueue(wire.request_from(message))
    except PacelineError as error:
        # The gateway handles errors by their class, and an error's own reason may be narrower.
        refused = f"{type(error).reason}: {error}"
        return [Chunk(message.request_id, (), (), (), finish=Finish.ERROR, error=refused)]
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
        self._rows_told = ring.rows_written if ring else 0
        self.chunks: list[Chunk] = []

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
        engine: CommandedEngine,
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

    def flush(self, can_send: Callable[[Chunk], bool] = lambda _: True) -> None:
        """Send the collected chunks. Without chunks, it reports rows only when they fill an eighth
        of the ring.

        `can_send` delays the last chunk of a request until its rows have reached the ring.
        """
        ring = self._ring
        ready: list[Chunk] = []
        held: list[Chunk] = []
        for chunk in self.chunks:
            (ready if can_send(chunk) else held).append(chunk)
        unread = ring.rows_written - self._rows_told if ring else 0
        if not ready and (ring is None or unread < max(ring.capacity // 8, 1)):
            return
        self.chunks[:] = held
        tokens = pb.TokensEmitted(chunks=[wire.chunk_to(chunk) for chunk in ready])
        if ring is not None:
            self._rows_told = tokens.rows_written = ring.rows_written
            tokens.rows_dropped = ring.rows_dropped
        self.send(pb.WorkerEvent(tokens=tokens))

    def close(self) -> None:
        """Send queued messages, within LINGER_MS at most."""
        self._socket.close()
        self._context.term()
