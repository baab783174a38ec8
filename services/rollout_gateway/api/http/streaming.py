"""Plans run and answered over HTTP: at once or as server-sent events.

Owns streams; what they say is the answers'.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.errors import InternalError, PacelineError, Unavailable
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.calls.call import Piece, Plan
from rollout_gateway.chat.messages import Delta, Message, joined
from rollout_gateway.gateway import Gateway

STREAM_QUEUE = 64
"""Pieces of one answer that wait for a slow client; more wait merged inside their generation."""
Event = tuple[str, dict[str, Any]]
"""(name of the event, or "" where the API names none; body)"""
Pieces = AsyncGenerator[tuple[int, Piece]]
"""(choice, its next piece)"""
T = TypeVar("T")


@dataclass
class AnswerChoice:
    """One completion so far."""

    prompt_tokens: int
    text: str = ""
    finish: str = ""  # "stop" | "length" | "tool_calls" | "abort" | "error", at the end
    reasoning_tokens: int = 0
    whole: pb.TokenChunk = field(default_factory=pb.TokenChunk)
    deltas: list[Delta] = field(default_factory=list)

    @property
    def message(self) -> Message:
        """What was said in a conversation, without a prefill."""
        return joined(self.deltas)

    def add(self, piece: Piece) -> None:
        """Take news. Raises InternalError when the engine failed."""
        self.text += piece.text
        self.whole.MergeFrom(piece.chunk)
        if piece.delta is not None:
            self.deltas.append(piece.delta)
        if piece.finish:
            self.finish, self.reasoning_tokens = piece.finish, piece.reasoning_tokens
            if piece.finish == "error":
                raise InternalError(piece.chunk.error)


class Answers(Protocol):
    """One API's spelling of one request's answers."""

    def whole(self, choices: list[AnswerChoice]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        ...

    def first(self) -> list[Event]:
        """Events before anything is said."""
        ...

    def piece(self, index: int, choice: AnswerChoice, piece: Piece) -> list[Event]:
        """Events of one piece; `choice` holds it already."""
        ...

    def last(self, choices: list[AnswerChoice]) -> list[Event]:
        """Events after the choices."""
        ...

    def failed(self, error: PacelineError) -> list[Event]:
        """Events of a stream that broke."""
        ...

    @property
    def end(self) -> str:
        """Raw text that ends the stream."""
        ...


class EventStream(Response):
    """Server-sent events that end their source when the client goes away."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, source: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task, not a group of them: a chunk passes here some hundred times a request.
        sending = asyncio.current_task()
        assert sending is not None
        gone = asyncio.create_task(self._cancel_when_gone(receive, sending))
        try:
            async with aclosing(self._source) as source:
                first = await anext(
                    source
                )  # what fails before there is anything to say gets a status of its own
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for data in source:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not gone.done():
                raise
            sending.uncancel()
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    @staticmethod
    async def _cancel_when_gone(receive: Receive, sending: asyncio.Task[None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()


class PlanRunner:
    """Runs plans of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(
        self, request: Request, plans: Sequence[Plan], answers: Answers, *, stream: bool
    ) -> Response:
        """Everything at once, or event by event."""
        headers = {"x-request-id": plans[0].completion_id.partition(":")[0]}
        if stream:
            return EventStream(self._events(plans, answers), headers)
        choices = await unless_gone(request, self._all(plans))
        return JSONResponse(answers.whole(choices), headers=headers)

    async def _all(self, plans: Sequence[Plan]) -> list[AnswerChoice]:
        """Every choice; when one fails the others end."""
        tasks = [asyncio.create_task(self._whole(plan)) for plan in plans]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(self, plan: Plan) -> AnswerChoice:
        choice = AnswerChoice(len(plan.prompt))
        choice.add(await self._gateway.call(plan).whole())
        return choice

    async def _events(self, plans: Sequence[Plan], answers: Answers) -> AsyncGenerator[bytes]:
        choices = [AnswerChoice(len(plan.prompt)) for plan in plans]
        began = False
        try:
            async with aclosing(self._pieces(plans)) as pieces:
                async for index, piece in pieces:
                    choices[index].add(piece)
                    for event in () if began else answers.first():
                        yield framed(event)
                    began = True
                    for event in answers.piece(index, choices[index], piece):
                        yield framed(event)
            for event in answers.last(choices):
                yield framed(event)
            yield answers.end.encode()
        except PacelineError as error:
            if not began:
                raise
            for event in answers.failed(error):
                yield framed(event)

    def _pieces(self, plans: Sequence[Plan]) -> Pieces:
        return self._one(plans[0]) if len(plans) == 1 else self._several(plans)

    async def _one(self, plan: Plan) -> Pieces:
        async with aclosing(self._gateway.call(plan).pieces(stream=True)) as pieces:
            async for piece in pieces:
                yield 0, piece

    async def _several(self, plans: Sequence[Plan]) -> Pieces:
        """Pieces of all choices as they come, each drawn in a task of its own."""
        queue: asyncio.Queue[tuple[int, Piece | PacelineError]] = asyncio.Queue(STREAM_QUEUE)
        tasks = [
            asyncio.create_task(self._feed(queue, index, plan)) for index, plan in enumerate(plans)
        ]
        left = len(plans)
        try:
            while left:
                index, piece = await queue.get()
                if isinstance(piece, PacelineError):
                    raise piece
                left -= bool(piece.finish)
                yield index, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self, queue: asyncio.Queue[tuple[int, Piece | PacelineError]], index: int, plan: Plan
    ) -> None:
        try:
            async with aclosing(self._gateway.call(plan).pieces(stream=True)) as pieces:
                async for piece in pieces:
                    await queue.put((index, piece))
        except PacelineError as error:
            await queue.put((index, error))


def framed(event: Event) -> bytes:
    """An event as server-sent events spell it."""
    name, body = event
    data = b"data: %b\n\n" % orjson.dumps(body)
    return b"event: %b\n%b" % (name.encode(), data) if name else data


async def unless_gone(request: Request, awaited: Awaitable[T]) -> T:
    """Run until done; cancelled when the client goes away."""
    work = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(
        request.receive()
    )  # the body is read: the next message is the disconnect
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Unavailable("the client went away")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
