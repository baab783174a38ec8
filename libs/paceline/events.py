"""Facts over ZeroMQ PUB/SUB, numbered per run. Owns delivery and the finding of gaps; no right
follows from a fact.

Frames: topic (run id and a zero byte), traceparent, Fact. PUB drops for a slow or late subscriber:
the numbers tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError

from paceline.errors import ConfigError, DataLoss, DeadlineExceeded
from paceline.telemetry import inject_frame
from paceline.v1.coordinator_pb2 import Fact

FACTS_QUEUED = 1000
"""Facts held for one subscriber; beyond it they are dropped and the subscriber sees a gap."""

OnGap = Callable[[int, int], Awaitable[None]]


class FactPublisher:
    """Publishes the facts of one run; numbers them from `first_sequence` on."""

    def __init__(self, address: str, run_id: str, *, first_sequence: int = 1) -> None:
        self._topic = _topic(run_id)
        self._next = first_sequence
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(FACTS_QUEUED)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot publish events: {error.strerror}; set addresses.events", seen=address
            ) from error

    @property
    def address(self) -> str:
        """Endpoint bound, with the real port."""
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    async def publish(self, fact: Fact) -> int:
        """Number and send one fact, which is not changed; returns the number.

        Never waits for a subscriber.
        """
        numbered = Fact()
        numbered.CopyFrom(fact)
        numbered.sequence = self._next
        self._next += 1
        await self._socket.send_multipart(
            [self._topic, inject_frame(), numbered.SerializeToString()]
        )
        return numbered.sequence

    def close(self) -> None:
        """Send what is queued, for at most a second, and stop."""
        self._context.destroy(linger=1000)

    def __enter__(self) -> FactPublisher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class FactSubscriber:
    """Async iterator over the facts of one run; reconnects by itself.

    `on_gap(first, last)` is awaited before the fact that follows a gap is returned. A first fact
    numbered above 1 is a gap, and so is a publisher that began again: then the range is (1, number
    - 1), empty when nothing is missing.
    """

    def __init__(
        self, address: str, run_id: str, on_gap: OnGap, *, deadline_s: float = 3600.0
    ) -> None:
        self._on_gap = on_gap
        self._deadline_s = deadline_s
        self._last = 0
        self.traceparent = b""
        """Trace context of the fact returned last; see telemetry.extract_frame."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(FACTS_QUEUED)
        self._socket.setsockopt(zmq.SUBSCRIBE, _topic(run_id))
        self._socket.connect(address)

    def __aiter__(self) -> FactSubscriber:
        return self

    async def __anext__(self) -> Fact:
        return await self.next(self._deadline_s)

    async def next(self, deadline_s: float) -> Fact:
        """The next fact.

        Raises DeadlineExceeded when none comes in time, DataLoss when one does not decode.
        """
        try:
            async with asyncio.timeout(deadline_s):
                frames = await self._socket.recv_multipart()
        except TimeoutError as error:
            raise DeadlineExceeded("no fact came in time", seen=f"{deadline_s} s") from error

        fact = _decode(frames)
        expected, self._last = self._last + 1, fact.sequence
        self.traceparent = bytes(frames[1])
        if fact.sequence > expected:
            await self._on_gap(expected, fact.sequence - 1)
        elif fact.sequence < expected:
            await self._on_gap(1, fact.sequence - 1)

        return fact

    def close(self) -> None:
        """Unsubscribe."""
        self._context.destroy(linger=0)

    def __enter__(self) -> FactSubscriber:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _topic(run_id: str) -> bytes:
    # Subscriptions match by prefix: the zero byte keeps run "a" from hearing run "ab".
    return run_id.encode() + b"\0"


def _decode(frames: list[bytes]) -> Fact:
    if len(frames) != 3:
        raise DataLoss("an event has another number of frames", seen=len(frames), allowed=3)
    try:
        return Fact.FromString(frames[2])
    except DecodeError as error:
        raise DataLoss("an event does not decode as a fact", seen=error) from error
