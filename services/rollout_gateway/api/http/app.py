"""The ASGI application: which path leads where. Owns routes, keys and what an unexpected failure
looks like.

Any model name is accepted; the served one is reported.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paceline import telemetry
from paceline.errors import InternalError, InvalidInput, NotFound, PacelineError
from rollout_gateway.api.http import bodies, errors, openapi
from rollout_gateway.api.http.anthropic.routes import AnthropicApi
from rollout_gateway.api.http.keys import caller_of, require_token
from rollout_gateway.api.http.observed import Observed
from rollout_gateway.api.http.openai.answers import ChatAnswers, CompletionAnswers
from rollout_gateway.api.http.openai.schema import ChatBody, CompletionBody
from rollout_gateway.api.http.responses.routes import ResponsesApi
from rollout_gateway.api.http.sessions import SessionsApi
from rollout_gateway.api.http.streaming import PlanRunner
from rollout_gateway.gateway import Gateway

MAX_REQUESTS_PER_CALL = 256
SCRAPE_DEADLINE_S = 5.0
"""A worker that answers later shows what it said last; Prometheus itself waits 10 s by default."""
log = telemetry.get_logger(__name__)


class HttpApi:
    """OpenAI's completions, and what is there for operators."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running = PlanRunner(gateway)

    async def health(self, request: Request) -> Response:
        """200 while at least one worker serves."""
        ready = len(self._gateway.router.processes())
        body = {
            "status": "ok" if ready else "starting",
            "model": self._gateway.model,
            "workers": ready,
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    async def models(self, request: Request) -> Response:
        await caller_of(self._gateway, request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        await caller_of(self._gateway, request)
        if request.path_params["name"] != self._gateway.model:
            raise NotFound(
                "no such model", seen=request.path_params["name"], allowed=self._gateway.model
            )
        return JSONResponse(self._model())

    async def metrics(self, request: Request) -> Response:
        """Every instrument of the process in Prometheus text format; workers are asked for what
        they know now.
        """
        await require_token(self._gateway, request)
        await self._gateway.router.healths(SCRAPE_DEADLINE_S)
        return Response(telemetry.prometheus_page(), media_type=telemetry.PROMETHEUS_TYPE)

    async def completions(self, request: Request) -> Response:
        caller = await caller_of(self._gateway, request)
        body = await bodies.read(request, CompletionBody)
        body.check()
        prompts = body.prompts()
        refuse_above(len(prompts) * body.n)
        self._gateway.admit()
        name = f"cmpl-{uuid.uuid4().hex}"
        plans = self._gateway.planner.completions(
            caller, prompts, body.sampling, count=body.n, completion_id=name
        )
        answers = CompletionAnswers(self._gateway.model, self._gateway.codec, body, name)
        return await self._running.answer(request, plans, answers, stream=body.stream)

    async def chat(self, request: Request) -> Response:
        caller = await caller_of(self._gateway, request)
        body = await bodies.read(request, ChatBody)
        refuse_above(body.n)
        self._gateway.admit()
        name = f"chatcmpl-{uuid.uuid4().hex}"
        plans = self._gateway.planner.chat(
            caller, body.request(), body.sampling, count=body.n, completion_id=name
        )
        answers = ChatAnswers(self._gateway.model, self._gateway.codec, body, name)
        return await self._running.answer(request, plans, answers, stream=body.stream)

    def _model(self) -> dict[str, object]:
        return {"id": self._gateway.model, "object": "model", "created": 0, "owned_by": "paceline"}


def build_app(gateway: Gateway) -> Observed:
    """The ASGI application."""
    api, sessions = HttpApi(gateway), SessionsApi(gateway)
    routes = [
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        openapi.route(),
        Route("/v1/models", api.models),
        Route("/v1/models/{name}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        *ResponsesApi(gateway).routes(),
        *AnthropicApi(gateway).routes(),
        *sessions.routes(),
    ]
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        PacelineError: _on_error,
        HTTPException: _on_http,
        Exception: _on_defect,
    }
    return Observed(Starlette(routes=routes, exception_handlers=handlers))


def refuse_above(count: int) -> None:
    """Raises InvalidInput for more generations in one call than are served."""
    if count > MAX_REQUESTS_PER_CALL:
        raise InvalidInput("prompts times n is too many", seen=count, allowed=MAX_REQUESTS_PER_CALL)


def _anthropic(request: Request) -> bool:
    return request.url.path.startswith("/v1/messages")


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return errors.answer(error, anthropic=_anthropic(request))


async def _on_http(request: Request, error: Exception) -> Response:
    """A path or a method that is not served."""
    assert isinstance(error, HTTPException)
    kinds = {404: "no such path", 405: "the path does not take this method"}
    text = kinds.get(error.status_code, error.detail)
    problem = NotFound(text, seen=f"{request.method} {request.url.path}"[:200])
    answer = errors.answer(problem, anthropic=_anthropic(request))
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer


async def _on_defect(request: Request, error: Exception) -> Response:
    """Our own fault: logged with its traceback, told without it."""
    log.error("a request failed", path=request.url.path, exc_info=error)
    return errors.answer(
        InternalError("the gateway failed; its log says why"), anthropic=_anthropic(request)
    )
