"""One keep-alive connection of the bench's load: HTTP/1.1 by hand. Owns when a stream's content and
its end came.

While a stream runs it only looks for the first content and for the last chunk; the events are read
after the end.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

FIRST_CONTENT = re.compile(rb'"content":\s*"[^"]')
LAST_CHUNK = b"\r\n0\r\n\r\n"
HEAD_END = b"\r\n\r\n"
STREAM_DEADLINE_S = 60.0


@dataclass(slots=True)
class Stream:
    """One request: when it was due, when its first content and its end came, and what came."""

    seed: int
    due_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    body: bytes = b""
    error: str = ""


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._stream: Stream | None = None
        self._done: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._tail = b""  # the end of what came, in which what is looked for may begin
        self.usable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._end(f"the connection was lost: {exc}" if exc else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        stream = self._stream
        if stream is None:
            return
        self._parts.append(data)
        seen = self._tail + data
        if not stream.first_s and FIRST_CONTENT.search(seen):
            stream.first_s = time.perf_counter()
        if seen.endswith(LAST_CHUNK) or self._short_answer_complete():
            stream.end_s = time.perf_counter()
            self._end("")
        self._tail = seen[-64:]

    async def ask(self, request: bytes, stream: Stream) -> None:
        """Send and wait for the end of the answer."""
        assert self._transport is not None
        self._stream, self._parts, self._tail = stream, [], b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(STREAM_DEADLINE_S):
                await self._done
        except TimeoutError:
            self.usable = False
            self._end(f"no end within {STREAM_DEADLINE_S} s")
            self._transport.abort()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def _short_answer_complete(self) -> bool:
        """Whether an answer that says its length, such as an error, is whole."""
        if len(self._parts) > 4:
            return False
        head, _, body = b"".join(self._parts).partition(HEAD_END)
        found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        return found is not None and len(body) >= int(found[1])

    def _end(self, error: str) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        whole = b"".join(self._parts)
        head, _, stream.body = whole.partition(HEAD_END)
        stream.status = int(head[9:12] or 0) if head.startswith(b"HTTP/1.1 ") else 0
        stream.error = error
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def contents(body: bytes) -> Iterator[str]:
    """Text of each event of a chunked event stream that has any."""
    for line in unchunked(body).split(b"\n"):
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            for choice in json.loads(line[6:]).get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    yield text


def unchunked(body: bytes) -> bytes:
    """A body of transfer-encoding chunked as it was before."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
