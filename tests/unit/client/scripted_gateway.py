"""A real HTTP server on a free port with scripted answers: correct, wrong, late, partial or
missing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from paceline.local.patience import patient

SESSION = {
    "id": "s1",
    "object": "session",
    "api_key": "key-of-s1",
    "state": "open",
    "group_id": "g1",
    "task": None,
}
Step = Callable[[Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Seen:
    """One received request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedGateway:
    """Records requests; request n gets step n of the script, later requests get `otherwise`.

    Tests that share the server use separate paths. An abandoned request of an earlier test may
    arrive late; it must neither be recorded nor use up a step.
    """

    root: str = ""
    forgotten: int = 0
    seen: list[Seen] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=deque)
    otherwise: Step | None = None
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when a client hung up on a step that waited."""

    def then(self, *steps: Step) -> None:
        self.steps.extend(steps)

    @property
    def base_url(self) -> str:
        """Base URL of this test's client; "" while no server runs."""
        return f"{self.root}{self._prefix}" if self.root else ""

    @property
    def _prefix(self) -> str:
        return f"/test-{self.forgotten}" if self.forgotten else ""

    def forget(self) -> None:
        """Begin anew, for the next test."""
        self.forgotten += 1
        self.seen, self.steps, self.otherwise, self.gone = [], deque(), None, threading.Event()

    def paths(self) -> list[str]:
        return [f"{one.method} {one.path}" for one in self.seen]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        raw = b""
        more = True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        asked = scope["raw_path"].decode()
        if not asked.startswith(f"{self._prefix}/"):  # of an earlier test
            await reply(410, {})(receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = asked.removeprefix(self._prefix) + (
            f"?{query.decode()}" if (query := scope["query_string"]) else ""
        )
        self.seen.append(Seen(scope["method"], path, headers, json.loads(raw) if raw else None))
        step = self.steps.popleft() if self.steps else self.otherwise or reply(200, SESSION)
        await step(receive, send)

    def hang(self, *before: bytes, status: int = 200) -> Step:
        """Send the head and these pieces, if there are any, then nothing until the client hangs
        up.
        """
        gone = self.gone  # of this test

        async def step(receive: Receive, send: Send) -> None:
            if before:
                await send({"type": "http.response.start", "status": status, "headers": []})
            for piece in before:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        return step


def reply(status: int, body: Any, **headers: str) -> Step:
    """A whole answer; a body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def step(receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": listed})
        await send({"type": "http.response.body", "body": content if status != 204 else b""})

    return step


def refuse(
    status: int, message: str, code: str, kind: str = "server_error", **headers: str
) -> Step:
    """The gateway's error body."""
    return reply(
        status,
        {"error": {"message": message, "type": kind, "param": None, "code": code}},
        **headers,
    )


def events(*chunks: Any, done: bool = True) -> Step:
    """A stream of server-sent events, each in a piece of its own."""
    said = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode() for chunk in chunks]

    async def step(receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        for piece in [*said, *([b"data: [DONE]\n\n"] if done else [])]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return step


async def close(receive: Receive, send: Send) -> None:
    """Close the connection instead of answering."""
    receive.__self__.transport.abort()  # type: ignore[attr-defined]  # uvicorn's cycle of this request
    await receive()


def close_within(*before: bytes) -> Step:
    """Close the connection in the middle of a body."""

    async def step(receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in before:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        receive.__self__.transport.close()  # type: ignore[attr-defined]
        await receive()

    return step


async def drip(receive: Receive, send: Send) -> None:
    """An endless body, a byte at a time: every read succeeds, but the answer never ends."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.ensure_future(receive())
    while not gone.done():
        await send({"type": "http.response.body", "body": b" ", "more_body": True})
        await asyncio.wait((gone,), timeout=0.01)


def listening(port: int = 0) -> socket.socket:
    """A socket on which connections wait until a server takes them."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    bound.listen(64)
    return bound


@contextmanager
def serving(
    gateway: ScriptedGateway, on: socket.socket, **options: Any
) -> Iterator[ScriptedGateway]:
    """Serve in a thread until the block is left; `options` are uvicorn's."""
    config = uvicorn.Config(gateway, http="h11", lifespan="off", log_level="error", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [on]})
    scheme = "https" if options.get("ssl_certfile") else "http"
    gateway.root = f"{scheme}://127.0.0.1:{on.getsockname()[1]}"
    thread.start()
    try:
        yield gateway
    finally:
        server.should_exit = server.force_exit = True
        thread.join(patient(10))
        on.close()
