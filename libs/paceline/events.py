"""Sends facts over ZeroMQ PUB/SUB, numbered per run, and detects gaps. Facts confer no rights.

Frames: topic (run id and a zero byte), traceparent, Facts. With a CURVE key pair, which all
processes of a run share, facts are encrypted, and only holders of the pair can receive them. PUB
drops messages for a slow or late subscriber; the numbers reveal the gap.
"""

from __future__ import annotations

import hmac
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace

import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.asyncio
from google.protobuf.message import DecodeError

from paceline.addresses import loopback, needs_ipv6
from paceline.errors import ConfigError, DataLoss, DeadlineExceeded
from paceline.telemetry import inject
from paceline.v1.coordinator_pb2 import Fact, Facts

FACTS_QUEUED = 10_000
"""Maximum messages queued per subscriber at each end. Further messages are dropped, and the
subscriber sees a gap. A coordinator sends a message after a durable write and about 0.1 ms of its
own work. So it sends fewer than 10,000 a second, and a subscriber that reads once a second misses
none.
"""

KEY_FILE = "the .key_secret file that zmq.auth.create_certificates writes"

OnGap = Callable[[int, int], Awaitable[None]]


class FactPublisher:
    """Publishes the facts of a run, numbered from `first_sequence`."""

    def __init__(
        self, address: str, run_id: str, *, first_sequence: int = 1, curve_key: str = ""
    ) -> None:
        """`curve_key`: file of the run's key pair. Needs a running event loop.

        Raises ConfigError if the address is taken or the file holds no key pair.
        """
        keys = _read_keys(curve_key)
        self._topic = _topic(run_id)
        self._next = first_sequence
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(FACTS_QUEUED)
        self._door = _guard(self._context, self._socket, keys) if keys is not None else None
        try:
            self._socket.bind(_resolved(address, self._socket))
        except zmq.ZMQError as error:
            self._end(linger_ms=0)
            message = f"cannot publish events: {error.strerror}; set addresses.events"
            raise ConfigError(message, seen=address) from error

    @property
    def address(self) -> str:
        """Bound endpoint with the real port."""
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    async def publish(self, *facts: Fact) -> int:
        """Numbers copies of the facts and sends them as one message. Returns the last number.

        Never waits for a subscriber.
        """
        message = Facts(facts=facts)
        for numbered in message.facts:
            numbered.sequence = self._next
            self._next += 1
        await self._socket.send_multipart(
            [self._topic, inject().get("traceparent", "").encode(), message.SerializeToString()]
        )
        return self._next - 1

    def close(self) -> None:
        """Sends queued messages for at most a second, then closes."""
        self._end(linger_ms=1000)

    def _end(self, linger_ms: int) -> None:
        if self._door is not None:
            self._door.stop()
        self._context.destroy(linger=linger_ms)

    def __enter__(self) -> FactPublisher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class FactSubscriber:
    """Async iterator over the facts of a run; reconnects automatically.

    `on_gap(first, last)` is awaited before the fact after a gap is returned. A first fact with a
    number above 1 is a gap. A publisher that restarts its numbers is a gap too. Its range is (1,
    number - 1), which is empty if no fact is missing.
    """

    def __init__(self, address: str, run_id: str, on_gap: OnGap, *, curve_key: str = "") -> None:
        """`curve_key`: file of the run's key pair. Raises ConfigError if it holds no key pair."""
        keys = _read_keys(curve_key)
        self._on_gap = on_gap
        self._last = 0
        self._heard: deque[Fact] = deque()  # of the last received message
        self.traceparent = b""
        """Trace context of the last returned fact; see telemetry.extract."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(FACTS_QUEUED)
        self._socket.setsockopt(zmq.SUBSCRIBE, _topic(run_id))
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
            self._socket.curve_serverkey = keys[0]
        self._socket.connect(_resolved(address, self._socket))

    async def next(self, deadline_s: float) -> Fact:
        """The next fact.

        Raises DeadlineExceeded after `deadline_s` seconds without a fact, DataLoss for a fact that
        does not decode.
        """
        while not self._heard:
            # Poll first: a cancelled receive could lose the fact that arrives; a poll consumes
            # none.
            if not await self._socket.poll(math.ceil(1000 * deadline_s)):
                raise DeadlineExceeded("no fact came in time", seen=f"{deadline_s} s")
            frames = await self._socket.recv_multipart()
            self._heard.extend(_decode(frames))
            self.traceparent = bytes(frames[1])

        fact = self._heard.popleft()
        expected, self._last = self._last + 1, fact.sequence
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


def _guard(
    context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, keys: tuple[bytes, bytes]
) -> zmq.auth.asyncio.AsyncioAuthenticator:
    """Starts the authenticator of a socket; CURVE alone encrypts but accepts any client."""
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.curve_server = True
    door = zmq.auth.asyncio.AsyncioAuthenticator(context)
    door.start()
    holders = SimpleNamespace(callback=lambda domain, key: hmac.compare_digest(key, keys[0]))
    door.configure_curve_callback(credentials_provider=holders)
    return door


def _read_keys(path: str) -> tuple[bytes, bytes] | None:
    """(public, secret) keys from a file of zmq.auth.create_certificates; None without a path."""
    if not path:
        return None
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read security.curve_key: {error}", seen=path) from error
    if secret is None:
        raise ConfigError("security.curve_key holds no secret key", seen=path, allowed=KEY_FILE)
    return public, secret


def _resolved(endpoint: str, socket: zmq.asyncio.Socket) -> str:
    """The endpoint with localhost resolved; sets the IP version of the socket."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    place = f"{loopback() if host == 'localhost' else host}:{port}"
    socket.setsockopt(zmq.IPV6, needs_ipv6(place))
    return f"tcp://{place}"


def _topic(run_id: str) -> bytes:
    # Subscriptions match by prefix: the zero byte keeps the facts of run "ab" from run "a".
    return run_id.encode() + b"\0"


def _decode(frames: list[bytes]) -> Sequence[Fact]:
    if len(frames) != 3:
        raise DataLoss("an event has another number of frames", seen=len(frames), allowed=3)
    try:
        return Facts.FromString(frames[2]).facts
    except DecodeError as error:
        raise DataLoss("an event does not decode as facts", seen=error) from error
