"""Cuts what goes to or comes from a worker on another host into parts that a stream of gRPC takes,
and puts them together again.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.errors import ResourceExhausted
from paceline.v1 import workers_pb2 as pb

PART_BYTES = 1 << 20
MOST_BYTES = 64 << 20
"""Of a command or an event."""


def parts(life: int, data: bytes) -> Iterator[pb.WorkerPart]:
    """At least one."""
    for start in range(0, max(len(data), 1), PART_BYTES):
        end = start + PART_BYTES
        yield pb.WorkerPart(life=life, data=data[start:end], more=end < len(data))


class JoinedParts:
    """Parts of one thing after another, each of so many bytes at most."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._data = bytearray()

    def add(self, part: pb.WorkerPart) -> bytes | None:
        """The whole of it with its last part, else None. Raises ResourceExhausted for too much."""
        size = len(self._data) + len(part.data)
        if size > self._most_bytes:
            raise ResourceExhausted(
                "an engine worker's message in parts",
                seen=f"{size} bytes or more",
                allowed=f"{self._most_bytes} bytes",
            )
        if not (part.more or self._data):
            return part.data
        self._data += part.data
        if part.more:
            return None
        whole, self._data = bytes(self._data), bytearray()
        return whole
