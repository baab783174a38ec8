"""HTTP/1.1 to a replica over its unix socket: whole requests out, answers back as they come.

What passes is not looked at but for where an answer begins and ends; a streamed answer passes
chunk by chunk, so a chunk must cost little.
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
"""An idle connection is used again for so long: less than the server keeps it."""
KEPT = 64
"""Idle connections."""
FULL_PARTS = 256
"""Parts of an answer that wait for the client; then no more are read."""
Headers = Sequence[tuple[bytes, bytes]]


class ReplicaAnswer(asyncio.Protocol):
    """One connection, and the answer that comes over it now."""

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
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none of its classes

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
        """Ask; what was answered before is forgotten."""
        self.status, self.headers, self.reusable = 0, [], False
        self._begin()
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target)]
        lines += [b"%b: %b" % header for header in headers]
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(body))
        self.transport.write(b"\r\n".join([*lines, b"", body]))

    async def head(self) -> None:
        """Returns once status and headers are there. Raises Unavailable when the replica is lost
        before.
        """
        while not self._headed:
            if self._lost:
                raise Unavailable("the replica of this request was lost", seen="no answer")
            await self._wait()

    async def parts(self) -> AsyncGenerator[bytes]:
        """The body as it comes. Raises Unavailable when the replica is lost before its end."""
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
        """An answer whose body is still to come; `release` it. Raises Unavailable when the replica
        cannot be reached, or is lost.
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
        """Nobody reads on: the connection is kept where the answer was whole, else the replica
        hears that its client has gone.
        """
        if answer.reusable and len(self._idle) < KEPT:
            answer.idle_since_s = time.monotonic()
            self._idle.append(answer)
        else:
            answer.transport.abort()

    def close(self) -> None:
        """Ends idle connections."""
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
        except OSError as error:  # TimeoutError too
            raise Unavailable("the replica of this request is away", seen=error) from error
        return answer
