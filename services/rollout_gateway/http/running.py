"""Plans run and answered over HTTP: at once or as server-sent events. Owns streams; what they say is the answers'."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.errors import InternalError, PacelineError, Unavailable
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.calls import Piece, Plan
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
class Choice:
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

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        ...

    def first(self) -> list[Event]:
        """Events before anything is said."""
        ...

    def piece(self, index: int, choice: Choice, piece: Piece) -> list[Event]:
        """Events of one piece; `choice` holds it already."""
        ...

    def last(self, choices: list[Choice]) -> list[Event]:
        """Events after the choices."""
        ...

    def failed(self, error: PacelineError) -> list[Event]:
        """Events of a stream that broke."""
        ...

    @property
    def end(self) -> str:
        """Raw text that ends the stream."""
        ...


class EventStream(StreamingResponse):
    """Server-sent events that end their source when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], pieces: Pieces, headers: Mapping[str, str]) -> None:
        super().__init__(events, headers=headers)
        self._events, self._pieces = events, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces), aclosing(self._events):
            await super().__call__(scope, receive, send)


class Running:
    """Runs plans of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(self, request: Request, plans: Sequence[Plan], answers: Answers, *, stream: bool) -> Response:
        """Everything at once, or event by event."""
        headers = {"x-request-id": plans[0].completion_id.partition(":")[0]}
        if not stream:
            choices = await unless_gone(request, self._all(plans))
            return JSONResponse(answers.whole(choices), headers=headers)
        pieces = self._pieces(plans)
        try:  # whatever is refused before the first token is refused by status
            first = await unless_gone(request, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise
        events = self._events(plans, answers, first, pieces)
        return EventStream(events, pieces, headers={"cache-control": "no-cache", **headers})

    async def _all(self, plans: Sequence[Plan]) -> list[Choice]:
        """Every choice; when one fails the others end."""
        tasks = [asyncio.create_task(self._whole(plan)) for plan in plans]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(self, plan: Plan) -> Choice:
        choice = Choice(len(plan.prompt))
        choice.add(await self._gateway.call(plan).whole())
        return choice

    async def _events(
        self, plans: Sequence[Plan], answers: Answers, first: tuple[int, Piece], pieces: Pieces
    ) -> AsyncGenerator[str]:
        choices = [Choice(len(plan.prompt)) for plan in plans]
        try:
            for event in answers.first():
                yield framed(event)
            async for index, piece in _chained(first, pieces):
                choices[index].add(piece)
                for event in answers.piece(index, choices[index], piece):
                    yield framed(event)
            for event in answers.last(choices):
                yield framed(event)
            yield answers.end
        except PacelineError as error:
            for event in answers.failed(error):
                yield framed(event)

    async def _pieces(self, plans: Sequence[Plan]) -> Pieces:
        """Pieces of all choices as they come. Each is drawn in a task of its own, whoever reads the stream."""
        queue: asyncio.Queue[tuple[int, Piece | PacelineError]] = asyncio.Queue(STREAM_QUEUE)
        tasks = [asyncio.create_task(self._feed(queue, index, plan)) for index, plan in enumerate(plans)]
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

    async def _feed(self, queue: asyncio.Queue[tuple[int, Piece | PacelineError]], index: int, plan: Plan) -> None:
        try:
            async with aclosing(self._gateway.call(plan).pieces(stream=True)) as pieces:
                async for piece in pieces:
                    await queue.put((index, piece))
        except PacelineError as error:
            await queue.put((index, error))


def framed(event: Event) -> str:
    """An event as server-sent events spell it."""
    name, body = event
    data = f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
    return f"event: {name}\n{data}" if name else data


async def _chained(first: tuple[int, Piece], rest: Pieces) -> AsyncIterator[tuple[int, Piece]]:
    yield first
    async for item in rest:
        yield item


async def unless_gone(request: Request, awaited: Awaitable[T]) -> T:
    """Run until done; cancelled when the client goes away."""
    work = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(request.receive())  # the body is read: the next message is the disconnect
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Unavailable("the client went away")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
