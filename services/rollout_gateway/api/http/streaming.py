"""Runs the calls of a request, and answers whole or as server-sent events over HTTP/1.1."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.errors import InternalError, PacelineError, Unavailable
from paceline.services.rollout_gateway.api.http import requests
from paceline.services.rollout_gateway.api.http.answers import Answers, B, Event, framed
from paceline.services.rollout_gateway.api.http.requests import caller_of, check_model, gateway_of
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.calls.call import Call, Piece

MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of the request line and all headers."""
MAX_FIELDS = 256
"""Maximum headers and trailers of a request."""
MAX_LATE_BYTES = 16 << 20
"""Maximum bytes of a body that are discarded after its answer, so that the client finishes and
reads the answer.
"""
PARTS, BODY = "paceline.parts", "body"
"""The ASGI extension, and its key for the BodyParts of a request."""


class BodyParts:
    """Writes parts of a streamed body synchronously, between two parts sent through ASGI's `send`.

    The engine's chunks for many connections arrive in one turn of the event loop. A coroutine for
    each, through all layers of an application, would cost more than the write.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        """Whether `write` may be called now: the answer has begun, and its client reads."""
        cycle = self._cycle
        closed = cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        # set only after the head, for a body without a length
        return bool(cycle.chunked_encoding and not closed)

    def write(self, data: bytes) -> None:
        """Write one part, not empty: a single system call if the client reads."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A client beyond the limits gets a 400, or loses the connection after its
    answer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = self._late_bytes = self._fields = 0

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        began = self._in_head
        super().data_received(data)
        cycle = self.cycle
        if began and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")
        elif cycle is not None and cycle.response_complete:
            self._late_bytes += len(data)
            if self._late_bytes > MAX_LATE_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = self._late_bytes = self._fields = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS or len(name) + len(value) > MAX_HEAD_BYTES:
            raise ValueError("too many headers")  # the parser turns it into a bad request
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before:
            self.cycle.scope["extensions"] = {PARTS: {BODY: BodyParts(self.cycle)}}


STREAM_QUEUE = 64
"""Pieces of one answer that wait for a slow client; further pieces wait merged in their generation.
"""
Queue = asyncio.Queue[tuple[int, Piece | Exception]]
Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


StreamPart = tuple[bytes, bool]
"""Events that are sent in one write, and whether further parts follow."""


class EventStream(Response):
    """Server-sent events; their source ends when the client disconnects.

    The events of a single choice are written directly as chunks arrive, if the server can do so.
    Several choices take turns, one piece after the other.
    """

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, calls: Sequence[Call], answers: Answers[Any]) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._calls = calls
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task, not a task group: a request sends hundreds of chunks here.
        sending = asyncio.current_task()
        assert sending is not None
        gone = asyncio.create_task(self._cancel_when_gone(receive, sending))
        try:
            async with aclosing(_events(self._calls, self._answers)) as source:
                # A failure before the first event gets its own status.
                part = await anext(source)
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
                await send(_message(part))
                parts = scope.get("extensions", {}).get(PARTS, {}).get(BODY)
                if parts is not None and len(self._calls) == 1:
                    self._write_at_once(parts)
                async for part in source:
                    await send(_message(part))
        except asyncio.CancelledError:
            if not gone.done():
                raise
            sending.uncancel()
        finally:
            await cancel(gone)

    def _write_at_once(self, parts: BodyParts) -> None:
        [call] = self._calls

        def give(piece: Piece) -> None:
            if data := self._answers.encode_piece(0, call, piece):
                parts.write(data)

        call.tell_at_once(parts.ready, give)

    @staticmethod
    async def _cancel_when_gone(receive: Receive, sending: asyncio.Task[None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()


def _message(part: StreamPart) -> Message:
    return {"type": "http.response.body", "body": part[0], "more_body": part[1]}


def generating(kind: type[Answers[B]]) -> Handler:
    """The handler of a request that generates."""

    async def handle(request: Request) -> Response:
        caller = await caller_of(request)
        asked, gateway = await requests.read(request, kind.body_type), gateway_of(request)
        asked.check()
        check_model(gateway, asked.model)
        answers = kind(request, asked, caller)
        gateway.admit()
        plans = await answers.plans()
        request.state.overridden = plans[0].overridden
        unheeded = () if plans[0].sampling.tool_grammar else asked.unheeded()
        paths = asked.undeclared.unread
        unread = [paths[part] for part in plans[0].unread if part in paths]
        request.state.ignored = tuple(sorted({*request.state.ignored, *unheeded, *unread}))
        calls = [Call(gateway, plan) for plan in plans]
        answer: Response
        if answers.body.stream:
            answer = EventStream(calls, answers)
        else:
            await unless_gone(request, _run(calls))
            answer = JSONResponse(answers.whole(calls))
        answer.headers.update(dict.fromkeys(answers.id_headers, answers.id))
        return answer

    return handle


async def _run(calls: Sequence[Call]) -> None:
    """Run every choice; when one choice fails the other choices end."""
    async with aclosing(_pieces(calls, stream=False)) as pieces:
        async for _, piece in pieces:
            _refuse(piece)


async def _events(calls: Sequence[Call], answers: Answers[Any]) -> AsyncGenerator[StreamPart]:
    """The answer, one part per piece. The last piece is sent together with the end."""
    began, left = False, len(calls)
    try:
        ending: list[Event] = []
        async with aclosing(_pieces(calls, stream=True)) as pieces:
            async for index, piece in pieces:
                _refuse(piece)
                events = [*(() if began else answers.first())]
                events += answers.piece(index, calls[index], piece)
                left -= bool(piece.finish)
                if not left:
                    ending = events
                elif events:
                    began = True
                    yield framed(events), True
        ending += answers.last(calls)
        yield framed(ending) + answers.end, False
    except PacelineError as error:
        if not began:
            raise
        yield framed([answers.failed(error)]), False


def _refuse(piece: Piece) -> None:
    """Raises InternalError when the engine failed."""
    if piece.finish == "error":
        raise InternalError(piece.chunk.error)


async def _pieces(calls: Sequence[Call], *, stream: bool) -> AsyncGenerator[tuple[int, Piece]]:
    """(choice, its next piece) as they arrive. Each of several choices runs in its own task."""
    if len(calls) == 1:
        async with aclosing(calls[0].pieces(stream=stream)) as pieces:
            async for piece in pieces:
                yield 0, piece
        return

    queue: Queue = asyncio.Queue(STREAM_QUEUE)
    feeds = (_feed(queue, index, call.pieces(stream=stream)) for index, call in enumerate(calls))
    tasks, left = list(map(asyncio.create_task, feeds)), len(calls)
    try:
        while left:
            index, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            left -= bool(news.finish)
            yield index, news
    finally:
        await cancel(*tasks)


async def _feed(queue: Queue, index: int, pieces: AsyncGenerator[Piece]) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                await queue.put((index, piece))
    except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
        await queue.put((index, error))


async def unless_gone(request: Request, awaited: Awaitable[T]) -> T:
    """Run until done. When the client disconnects, cancels the work and raises Unavailable."""
    work = asyncio.ensure_future(awaited)
    # The body has been read, so the next message is the disconnect.
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Unavailable("the client went away")
        return work.result()
    finally:
        await cancel(work, gone)
