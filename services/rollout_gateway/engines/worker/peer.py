"""The worker's side of its socket: it receives commands, sends events, and collects chunks between
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import zmq

from paceline.errors import PacelineError
from paceline.services.rollout_gateway.engines.base import CommandedEngine
from paceline.services.rollout_gateway.engines.nouns import Chunk
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.engines.worker.commands import answer
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.v1 import engine_pb2 as pb

SEND_DEADLINE_MS = 30_000
LINGER_MS = 2000


class Peer:
    """Owns the socket; the caller owns the engine."""

    def __init__(self, address: str, ring: RowRing | None = None) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_DEADLINE_MS)
        self._socket.setsockopt(zmq.SNDHWM, 10_000)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(address)
        self._ring = ring
        self._rows_told = ring.rows_written if ring else 0
        self.chunks: list[Chunk] = []

    def waits(self, wait_ms: int, others: Sequence[Any] = ()) -> bool:
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

    def obey(
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

    def flush(self, may_leave: Callable[[Chunk], bool] = lambda _: True) -> None:
        """Send the collected chunks. Without chunks, it reports rows only when they fill an eighth
        of the ring.

        `may_leave` delays the last chunk of a request until its rows have reached the ring.
        """
        ring = self._ring
        ready: list[Chunk] = []
        held: list[Chunk] = []
        for chunk in self.chunks:
            (ready if may_leave(chunk) else held).append(chunk)
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
