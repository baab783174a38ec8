"""The worker protocol inside SGLang's scheduler: commands in, events out.

Rank 0 only; owns no engine state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from paceline.v1 import engine_pb2 as pb
from rollout_gateway.engines.nouns import Chunk
from rollout_gateway.engines.worker import wire
from rollout_gateway.engines.worker.ring import RowRing

SEND_DEADLINE_MS = 30_000
IDLE_MS = 1000
"""A sleeping scheduler looks at its parent and at its other sockets at least this often."""


class Peer:
    """Collects chunks between two rounds and sends them as one message."""

    def __init__(self, address: str, ring: RowRing | None) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_DEADLINE_MS)
        self._socket.setsockopt(zmq.SNDHWM, 10_000)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)
        self._ring = ring
        self._rows_told = ring.rows_written if ring else 0
        self.chunks: list[Chunk] = []

    def receive(self) -> list[bytes]:
        """All commands that wait, as they came."""
        commands: list[bytes] = []
        while self._socket.poll(0):
            commands.append(self._socket.recv())
        return commands

    def sleep(self, others: list[Any]) -> None:
        """Until a command or news on one of SGLang's own sockets comes; at most IDLE_MS."""
        poller = zmq.Poller()
        for socket in (self._socket, *others):
            poller.register(socket, zmq.POLLIN)
        poller.poll(IDLE_MS)

    def send(self, event: pb.WorkerEvent) -> None:
        """One event.

        Raises zmq.Again when the gateway has not taken anything for SEND_DEADLINE_MS.
        """
        self._socket.send(event.SerializeToString())

    def flush(self, may_leave: Callable[[Chunk], bool]) -> None:
        """Send what has been collected; rows alone are told of when an eighth of the ring waits.

        `may_leave` holds back the last chunk of a request whose rows are still on their way to the
        ring.
        """
        ready = [chunk for chunk in self.chunks if may_leave(chunk)]
        unread = self._ring.rows_written - self._rows_told if self._ring else 0
        if not ready and (self._ring is None or unread < max(self._ring.capacity // 8, 1)):
            return
        self.chunks = [chunk for chunk in self.chunks if chunk not in ready]
        tokens = pb.TokensEmitted(chunks=[wire.chunk_to(chunk) for chunk in ready])
        if self._ring is not None:
            self._rows_told = tokens.rows_written = self._ring.rows_written
            tokens.rows_dropped = self._ring.rows_dropped
        self.send(pb.WorkerEvent(tokens=tokens))

    def close(self) -> None:
        """Send what was given; waits at most the linger time."""
        self._socket.close()
