"""Loads a front door: streamed chat completions over HTTP/1.1 with keep-alive. It compares every
stream's text with its script.

It is a separate process. One JSON line on standard input requests a run (see Order), and one line
on standard output is the result (see summary). A heavy client would measure itself, so connections
are written by hand. During a stream they look only for the first content and for the last chunk.
The events are parsed after the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import resource
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

FIRST_CONTENT = re.compile(rb'"content":\s*"[^"]')
LAST_CHUNK = b"\r\n0\r\n\r\n"
HEAD_END = b"\r\n\r\n"
STREAM_DEADLINE_S = 60.0


@dataclass(slots=True)
class TimedStream:
    """One request: its due time, the times of its first content and its end, and the data
    received.
    """

    seed: int
    due_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    body: bytes = b""
    error: str = ""


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way."""

    def __init__(self, deadline_s: float = STREAM_DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._transport: asyncio.Transport | None = None
        self._stream: TimedStream | None = None
        self._done: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._tail = b""  # end of the received data, where a searched pattern may begin
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

    async def ask(self, request: bytes, stream: TimedStream) -> None:
        """Sends a request and waits for the end of the answer."""
        assert self._transport is not None
        self._stream, self._parts, self._tail = stream, [], b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._done
        except TimeoutError:
            self.usable = False
            self._end(f"no end within {self._deadline_s} s")
            self._transport.abort()

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()

    def _short_answer_complete(self) -> bool:
        """Whether an answer with a content length, such as an error, is complete."""
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
    """Yields the text of each event in a chunked event stream, if it has text."""
    for line in unchunked(body).split(b"\n"):
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            for choice in json.loads(line[6:]).get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    yield text


def unchunked(body: bytes) -> bytes:
    """Decodes a body with transfer-encoding chunked."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


LINE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Order:
    """A run to do: `streams` closed loops, or arrivals at `rate` per second, or a request under
    each key of `keys`.
    """

    port: int
    model: str
    texts: Sequence[str]  # of the script; a request's seed picks
    # seconds of the backend's rounds for each text; a later end counts as late
    paces_s: Sequence[float]
    # a closed loop waits for a random part of this, so that requests do not synchronise with rounds
    think_s: float
    max_tokens: int
    streams: int = 1
    seconds: float = 1.0
    rate: float = 0.0
    keys: Sequence[str] = ()
    first_seed: int = 0  # of the first request; a front must not get a prompt twice


@dataclass
class Tally:
    """Counts and times of a run."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # end, less the seconds of the rounds
    right: int = 0
    wrong: int = 0  # other text than the script's: tokens lost, twice or changed
    failed: int = 0
    chunks: int = 0
    example: str = ""  # of an error

    def take(self, stream: TimedStream, order: Order) -> None:
        """Checks one ended stream."""
        if stream.error or stream.status != 200:
            self.failed += 1
            self.example = stream.error or f"{stream.status}: {stream.body[:300]!r}"
            return
        pieces = list(contents(stream.body))
        which = stream.seed % len(order.texts)
        text, expected = "".join(pieces), order.texts[which]
        self.right += text == expected
        if text != expected:
            self.wrong += 1
            self.example = f"seed {stream.seed}: {len(text)} characters for {len(expected)}"
        self.chunks += len(pieces)
        self.first_s.append(stream.first_s - stream.due_s)
        self.whole_s.append(stream.end_s - stream.due_s)
        self.late_s.append(self.whole_s[-1] - order.paces_s[which])


class LoadRun:
    """One run of an order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._seeds = itertools.count(order.first_seed)
        self._think = random.Random(order.first_seed)
        self._idle: list[Connection] = []
        self.tally = Tally()

    async def run(self) -> dict[str, Any]:
        """Does the run; returns the summary."""
        order = self._order
        began, cpu = time.perf_counter(), cpu_s()
        if order.keys:
            await self._each_key()
        elif order.rate:
            await self._arrivals(began)
        else:
            await asyncio.gather(
                *(self._closed_loop(began + order.seconds) for _ in range(order.streams))
            )
        seconds = time.perf_counter() - began
        for connection in self._idle:
            connection.close()
        return summary(self.tally, seconds, cpu_s() - cpu)

    async def _closed_loop(self, until_s: float) -> None:
        """Sends the next request when the last request has ended."""
        while time.perf_counter() < until_s:
            await asyncio.sleep(self._think.uniform(0, self._order.think_s))
            await self._one(time.perf_counter())

    async def _arrivals(self, began: float) -> None:
        """Sends Poisson arrivals; a request's time counts from its due time, despite any delay
        before it.
        """
        draw = random.Random(self._order.first_seed)
        tasks: set[asyncio.Task[None]] = set()
        due = began
        async with asyncio.TaskGroup() as group:
            while (due := due + draw.expovariate(self._order.rate)) < began + self._order.seconds:
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                task = group.create_task(self._one(due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _each_key(self) -> None:
        """Sends one request under each key, `streams` at a time."""
        left = iter(self._order.keys)

        async def some() -> None:
            for key in left:
                await self._one(time.perf_counter(), key)

        await asyncio.gather(*(some() for _ in range(self._order.streams)))

    async def _one(self, due_s: float, key: str = "none") -> None:
        stream = TimedStream(next(self._seeds), due_s)
        try:
            connection = await self._connection()
            await connection.ask(self._request(stream.seed, key), stream)
        except OSError as error:
            stream.error = f"cannot connect: {error}"
        else:
            if connection.usable:
                self._idle.append(connection)
        self.tally.take(stream, self._order)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._order.port)
        return connection

    def _request(self, seed: int, key: str) -> bytes:
        order = self._order
        body = json.dumps(
            {
                "model": order.model,
                "messages": [{"role": "user", "content": f"bench {seed}"}],
                "stream": True,
                "seed": seed,
                "max_tokens": order.max_tokens,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: "
            "application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def summary(tally: Tally, seconds: float, cpu: float) -> dict[str, Any]:
    """Figures of a run; latencies in milliseconds, None without values."""
    ended = tally.right + tally.wrong
    return {
        "requests": ended + tally.failed,
        "right": tally.right,
        "wrong": tally.wrong,
        "failed": tally.failed,
        "example": tally.example,
        "seconds": seconds,
        "requests_per_s": ended / seconds,
        "chunks_per_request": tally.chunks / ended if ended else 0.0,
        "first_p50_ms": percentile_ms(tally.first_s, 50),
        "first_p99_ms": percentile_ms(tally.first_s, 99),
        "whole_p50_ms": percentile_ms(tally.whole_s, 50),
        "whole_p99_ms": percentile_ms(tally.whole_s, 99),
        "late_p50_ms": percentile_ms(tally.late_s, 50),
        "late_p99_ms": percentile_ms(tally.late_s, 99),
        "load_cpu_share": cpu / seconds,
    }


def percentile_ms(values_s: Sequence[float], percent: int) -> float | None:
    """A percentile of seconds, in milliseconds."""
    if len(values_s) < 2:
        return 1e3 * values_s[0] if values_s else None
    return 1e3 * statistics.quantiles(values_s, n=100, method="inclusive")[percent - 1]


def median(values: Iterable[float]) -> float | None:
    """Median of the values; None without values."""
    listed = list(values)
    return statistics.median(listed) if listed else None


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def serve() -> None:
    """Runs orders until standard input closes."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        answer = await LoadRun(Order(**json.loads(line))).run()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # the signal may reach the whole process group; closed input ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(serve())
