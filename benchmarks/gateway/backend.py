"""The scripted responses behind OpenAI's streamed chat completions, for a proxy that wants an HTTP
backend.

A process of its own: reads a Pace as JSON from its arguments, prints its port, ends when standard
input closes. Rounds run as in the scripted engine: one for all streams, each `round_s` long, each
giving every stream its next piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from typing import Any

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from benchmarks.gateway.script import MODEL, Pace, lengths, pieces, texts
from rollout_gateway.testing.scripted.script import next_beat


class Rounds:
    """Wakes all streams together, once a round, while there are any."""

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._streams = 0
        self._next: asyncio.Future[None] | None = None
        self._ticker: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def joined(self) -> Any:
        """A stream takes part."""
        self._streams += 1
        if self._ticker is None and self._round_s:
            self._ticker = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            self._streams -= 1

    async def end_of_round(self) -> None:
        """Wait for the end of the next round."""
        if not self._round_s:
            await asyncio.sleep(0)
            return
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)

    async def _tick(self) -> None:
        beat = 0.0
        while self._streams:
            beat = next_beat(time.perf_counter(), beat, self._round_s)
            await asyncio.sleep(beat - time.perf_counter())
            waiting, self._next = self._next, None
            if waiting is not None:
                waiting.set_result(None)
        self._ticker = None


class Backend:
    """The ASGI application."""

    def __init__(self, pace: Pace) -> None:
        self._rounds = Rounds(pace.round_s)
        self._events = [
            [_event(delta={"content": one}) for one in pieces(text, pace)] for text in texts(pace)
        ]
        self._tokens_per_round = pace.tokens_per_round
        self._lengths = lengths(pace)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = json.loads(await _body(receive) or b"{}")
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self._rounds.joined():
            which = int(body.get("seed", 0)) % len(self._events)
            for number, event in enumerate(self._events[which]):
                await self._rounds.end_of_round()
                first = _event(delta={"role": "assistant", "content": ""}) if number == 0 else b""
                await send({"type": "http.response.body", "body": first + event, "more_body": True})
            if (
                self._lengths[which] % self._tokens_per_round == 0
            ):  # the end token has a round of its own
                await self._rounds.end_of_round()
        await send(
            {
                "type": "http.response.body",
                "body": _event(delta={}, finish="stop") + b"data: [DONE]\n\n",
            }
        )


def _event(*, delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return (
        b"data: " + json.dumps({**head, "choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"
    )


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def serve(pace: Pace) -> None:
    """Serve until standard input closes."""
    config = uvicorn.Config(
        Backend(pace), host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    listening.listen(config.backlog)  # whoever reads the port may connect at once
    serving = asyncio.create_task(server.serve([listening]))
    sys.stdout.write(json.dumps({"port": listening.getsockname()[1]}) + "\n")
    sys.stdout.flush()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()
    server.should_exit = server.force_exit = True
    await serving


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # it may reach the whole group; closed input ends this process
    uvloop.run(serve(Pace(**json.loads(sys.argv[1]))))
