"""HTTP over the gateway: OpenAI's completions and models, health, Prometheus metrics. Owns routes, SSE and error shape.

Bodies are http_schema.py's, answers http_answers.py's. Any model name is accepted; the served one is reported.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline import telemetry
from paceline.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidInput,
    NotFound,
    PacelineError,
    ResourceExhausted,
    Unavailable,
)
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.gateway import Gateway, Piece
from rollout_gateway.http_answers import Answers, ChatAnswers, Choice, CompletionAnswers
from rollout_gateway.http_schema import ChatBody, CompletionBody, GenerationBody
from rollout_gateway.request_checks import check_request

MAX_BODY_BYTES = 8 << 20
MAX_REQUESTS_PER_CALL = 256
STREAM_QUEUE = 64
SCRAPE_DEADLINE_S = 5.0
"""A worker that answers later shows what it said last; Prometheus itself waits 10 s by default."""
STATUS = (
    (InvalidInput, 400, "invalid_request_error"),
    (NotFound, 404, "not_found_error"),
    (FailedPrecondition, 409, "invalid_request_error"),
    (ResourceExhausted, 429, "rate_limit_error"),
    (Unavailable, 503, "server_error"),
    (DeadlineExceeded, 504, "server_error"),
)
B = TypeVar("B", bound=GenerationBody)


class EventStream(StreamingResponse):
    """Server-sent events that end their source when the client goes away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(cast("AsyncIterator[str]", self.body_iterator)):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


class HttpApi:
    """The routes."""

    def __init__(self, gateway: Gateway, token: str) -> None:
        self._gateway = gateway
        self._token = token

    async def health(self, request: Request) -> Response:
        """200 while at least one worker serves."""
        ready = len(self._gateway.router.processes())
        body = {"status": "ok" if ready else "starting", "model": self._gateway.model, "workers": ready}
        return JSONResponse(body, status_code=200 if ready else 503)

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        served = {"id": self._gateway.model, "object": "model", "created": 0, "owned_by": "paceline"}
        return JSONResponse({"object": "list", "data": [served]})

    async def metrics(self, request: Request) -> Response:
        """Every instrument of the process in Prometheus text format; workers are asked for what they know now."""
        self._authorize(request)
        await self._gateway.router.healths(SCRAPE_DEADLINE_S)
        return Response(telemetry.prometheus_page(), media_type=telemetry.PROMETHEUS_TYPE)

    async def completions(self, request: Request) -> Response:
        self._authorize(request)
        body = parse(CompletionBody, await read_body(request))
        body.check()
        codec = self._gateway.codec
        prompts = [codec.encode(one) if isinstance(one, str) else tuple(one) for one in body.prompts()]
        return await self._answer(request, body, prompts, CompletionAnswers(self._gateway.model, codec, body))

    async def chat(self, request: Request) -> Response:
        self._authorize(request)
        body = parse(ChatBody, await read_body(request))
        prompt = self._gateway.codec.encode_chat([message.rendered() for message in body.messages])
        return await self._answer(request, body, [prompt], ChatAnswers(self._gateway.model, self._gateway.codec, body))

    async def _answer(
        self, request: Request, body: GenerationBody, prompts: list[tuple[int, ...]], answers: Answers
    ) -> Response:
        gateway, ready = self._gateway, self._gateway.router.ready
        count = len(prompts) * body.n
        if count > MAX_REQUESTS_PER_CALL:
            raise InvalidInput("prompt times n is too many", seen=count, allowed=MAX_REQUESTS_PER_CALL)
        gateway.admit()
        jobs: list[tuple[tuple[int, ...], tpb.SamplingParams]] = []
        for prompt in prompts:
            for index in range(body.n):
                sampling = body.sampling(index, max(ready.max_sequence_tokens - len(prompt), 1))
                check_request(ready, prompt, sampling)
                jobs.append((prompt, sampling))
        if body.stream:
            return EventStream(self._events(jobs, answers), media_type="text/event-stream")
        choices = await unless_gone(request, lambda: asyncio.gather(*(self._collect(*job) for job in jobs)))
        return JSONResponse(answers.whole(list(choices)))

    async def _collect(self, prompt: tuple[int, ...], sampling: tpb.SamplingParams) -> Choice:
        choice = Choice(len(prompt))
        pieces = self._gateway.generate(prompt, sampling, stream=False)
        async with aclosing(pieces):
            async for piece in pieces:
                choice.add(piece)
        refuse_failed(choice)
        return choice

    async def _events(
        self, jobs: list[tuple[tuple[int, ...], tpb.SamplingParams]], answers: Answers
    ) -> AsyncIterator[str]:
        """Chunks of all choices as they come, then [DONE]."""
        queue: asyncio.Queue[tuple[int, Piece | PacelineError]] = asyncio.Queue(STREAM_QUEUE)
        tasks = [asyncio.create_task(self._feed(queue, index, *job)) for index, job in enumerate(jobs)]
        choices = [Choice(len(prompt)) for prompt, _ in jobs]
        left = len(jobs)
        try:
            while left:
                index, piece = await queue.get()
                if isinstance(piece, PacelineError):
                    yield _event(error_body(piece)[1])
                    return
                choices[index].add(piece)
                left -= piece.chunk.finish_reason != tpb.FINISH_REASON_UNSPECIFIED
                if piece.chunk.finish_reason == tpb.FINISH_REASON_ERROR:
                    yield _event(error_body(InternalError(piece.chunk.error))[1])
                    return
                yield _event(answers.piece(index, choices[index], piece))
            usage = answers.last(choices)
            if usage is not None:
                yield _event(usage)
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self,
        queue: asyncio.Queue[tuple[int, Piece | PacelineError]],
        index: int,
        prompt: tuple[int, ...],
        sampling: tpb.SamplingParams,
    ) -> None:
        pieces = self._gateway.generate(prompt, sampling, stream=True)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    await queue.put((index, piece))
        except PacelineError as error:
            await queue.put((index, error))

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise InvalidInput("the request carries no token or a wrong one", reason="UNAUTHENTICATED")


def build_app(gateway: Gateway, token: str = "") -> Starlette:
    """The ASGI application."""
    api = HttpApi(gateway, token)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/v1/models", api.models),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
        ],
        exception_handlers={PacelineError: _on_error},
    )


def parse(kind: type[B], raw: bytes) -> B:
    """The body, checked. Raises InvalidInput naming the first wrong field."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "body"
        seen = repr(first.get("input"))[:100]
        raise FieldError(name, f"{name}: {first['msg']}", seen=seen) from error


class FieldError(InvalidInput):
    """A field of the body is wrong."""

    def __init__(self, field: str, message: str, *, seen: str) -> None:
        super().__init__(message, seen=seen)
        self.field = field


async def read_body(request: Request) -> bytes:
    """At most MAX_BODY_BYTES. Raises InvalidInput."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise InvalidInput("the body is too large", seen=f"over {MAX_BODY_BYTES} bytes", allowed=MAX_BODY_BYTES)
        parts.append(part)
    return b"".join(parts)


async def unless_gone(request: Request, start: Callable[[], Awaitable[list[Choice]]]) -> list[Choice]:
    """Run until done; cancelled when the client goes away."""
    work = asyncio.ensure_future(start())
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


def refuse_failed(choice: Choice) -> None:
    """Raises InternalError when the engine failed."""
    if choice.finish_reason == tpb.FINISH_REASON_ERROR:
        raise InternalError(choice.error)


def error_body(error: PacelineError) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body in OpenAI's error shape)."""
    status, kind = next(
        ((code, name) for family, code, name in STATUS if isinstance(error, family)), (500, "server_error")
    )
    if error.reason == "UNAUTHENTICATED":
        status, kind = 401, "authentication_error"
    field = getattr(error, "field", None) or _field_of(error.message)
    return status, {"error": {"message": str(error), "type": kind, "param": field, "code": error.reason.lower()}}


def _field_of(message: str) -> str | None:
    """The body's field a message begins with."""
    first = message.partition(" ")[0]
    return first if first in CompletionBody.model_fields or first in ChatBody.model_fields else None


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    status, body = error_body(error)
    return JSONResponse(body, status_code=status, headers={"retry-after": "1"} if status in (429, 503) else None)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
