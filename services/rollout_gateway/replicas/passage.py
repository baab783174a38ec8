"""HTTP/1.1 to a replica over its unix socket: sends whole requests and passes answers on as they
arrive.

It parses only the beginning and the end of an answer. A streamed answer passes chunk by chunk, so a
chunk must be cheap.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import cast

import httptools

from paceline.errors import Unavailable
from paceline.local.patience import patient

CONNECT_S = 5.0
REUSED_S = 2.0
"""Maximum idle time of a reused connection, seconds; shorter than the server's limit."""
KEPT = 64
"""Maximum idle connections."""
FULL_PARTS = 256
"""Parts of an answer that may wait for the client; reading then pauses."""
Headers = Sequence[tuple[bytes, bytes]]


class ReplicaAnswer(asyncio.Protocol):
    """One connection and its current answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since_s = 0.0
        self.reusable = False
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._headed = self._whole = self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self.reusable = False
        self._news.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()
        if len(self._parts) > FULL_PARTS:
            self.transport.pause_reading()
        self._news.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """See httptools."""
        self.status = self._parser.get_status_code()
        self._headed = True

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._whole = True
        self.reusable = self._parser.should_keep_alive()

    def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        """Sends a request and discards the former answer."""
        self.status, self.headers, self.reusable = 0, [], False
        self._begin()
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target)]
        lines += [b"%b: %b" % header for header in headers]
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(body))
        self.transport.write(b"\r\n".join([*lines, b"", body]))

    async def head(self) -> None:
        """Returns when status and headers have arrived. Raises Unavailable if the replica is lost
        before.
        """
        while not self._headed:
            if self._lost:
                raise Unavailable("the replica of this request was lost", seen="no answer")
            await self._wait()

    async def parts(self) -> AsyncGenerator[bytes]:
        """The body as it arrives. Raises Unavailable if the replica is lost before the end."""
        while True:
            if self._parts:
                part = b"".join(self._parts)
                self._parts.clear()
                self.transport.resume_reading()
                yield part
            elif self._whole:
                return
            elif self._lost:
                raise Unavailable("the replica of this request was lost", seen="half an answer")
            else:
                await self._wait()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class Passage:
    """Connections to one replica."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[ReplicaAnswer] = []

    async def ask(self, method: str, target: bytes, headers: Headers, body: bytes) -> ReplicaAnswer:
        """Returns an answer without its body; `release` it. Raises Unavailable if the replica
        cannot be reached or is lost.
        """
        answer = self._reused() or await self._connected()
        answer.send(method, target, headers, body)
        try:
            await answer.head()
        except BaseException:
            answer.transport.abort()
            raise
        return answer

    def release(self, answer: ReplicaAnswer) -> None:
        """Ends the use of an answer. The connection is kept after a whole answer; otherwise it is
        closed, which notifies the replica.
        """
        if answer.reusable and len(self._idle) < KEPT:
            answer.idle_since_s = time.monotonic()
            self._idle.append(answer)
        else:
            answer.transport.abort()

    def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            self._idle.pop().transport.abort()

    def _reused(self) -> ReplicaAnswer | None:
        while self._idle:
            answer = self._idle.pop()
            if answer.reusable and time.monotonic() - answer.idle_since_s < REUSED_S:
                return answer
            answer.transport.abort()
        return None

    async def _connected(self) -> ReplicaAnswer:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patient(CONNECT_S)):
                _, answer = await loop.create_unix_connection(ReplicaAnswer, self._path)
        except OSError as error:  # includes TimeoutError
            raise Unavailable("the replica of this request is away", seen=error) from error
        return answer
