"""Makes the ASGI application: its routes, its OpenAPI document and the layers around requests.

Handlers note these parts in the request's state. Any answer gets the headers, errors too.

On loopback the gateway trusts every client, and a page in its user's browser can reach it too. Such
a page may use its own name that resolves to loopback (DNS rebinding): its Host is foreign. Or it
sends a request without a preflight: its Origin is foreign, or its body is no JSON (see
requests.py).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import telemetry
from paceline.errors import InternalError, InvalidInput, NotFound, PacelineError
from paceline.rpc import names_loopback
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.api.http import answers, beyond, responses
from paceline.services.rollout_gateway.api.http import routes as operators
from paceline.services.rollout_gateway.api.http.routes import (
    ANSWERS,
    EVENT,
    OPERATIONS,
    TEXT,
    Operation,
    Schema,
)
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.telemetry import extract, names, span

OVERRIDDEN_HEADER = "x-paceline-overridden"
TOLD = {beyond.IGNORED_HEADER: "ignored", OVERRIDDEN_HEADER: "overridden"}
"""Header -> attribute of the request's state, a sequence of texts."""


class Told:
    """An ASGI application around another application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                state = scope.get("state", {})
                headers = MutableHeaders(scope=message)
                for name, noted in TOLD.items():
                    if texts := state.get(noted):
                        headers[name] = ", ".join(texts)
            await send(message)

        await self._app(scope, receive, telling)


class Observed:
    """An ASGI application around another application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # the client disconnected before an answer

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.perf_counter()
        carrier = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        metrics.HTTP_OPEN.record(1)
        try:
            about = {names.HTTP_METHOD: scope["method"]}
            with span(names.HTTP_REQUEST, about, kind="server", parent=extract(carrier)) as current:
                try:
                    await self._app(scope, receive, watched)
                finally:
                    current.set_attribute(names.HTTP_ROUTE, _route(scope))
                    current.set_attribute(names.HTTP_STATUS, status)
        finally:
            metrics.HTTP_OPEN.record(-1)
            labels = {"route": _route(scope), "status": str(status)}
            metrics.HTTP_REQUESTS.record(**labels)
            metrics.HTTP_DURATION.record(time.perf_counter() - started, **labels)


def _route(scope: Scope) -> str:
    """The route's pattern. Unknown paths share one name, so that strangers cannot flood the
    metrics.
    """
    route = scope.get("route")
    return str(getattr(route, "path", "none"))


class SameSite:
    """An ASGI application around another application. `loopback`: the server only listens on this
    machine. `origins`: sites with access; "*" allows all sites.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._loopback = loopback
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                check_site(request.headers, loopback=self._loopback, origins=self._origins)
            except InvalidInput as error:
                await answers.answer(error, request)(scope, receive, send)
                return

        await self._app(scope, receive, send)


def check_site(headers: Headers, *, loopback: bool, origins: Sequence[str] = ()) -> None:
    """Raises InvalidInput (NOT_ALLOWED) for a foreign Host on loopback, or a foreign Origin outside
    the given origins.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if loopback and not names_loopback(host):
        raise InvalidInput(
            "the Host header names another machine than this one",
            reason="NOT_ALLOWED",
            seen=host[:100],
            allowed="localhost or a loopback address",
        )
    if "*" in origins or origin in origins:
        return
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise InvalidInput(
            "the page of another site asked for this",
            reason="NOT_ALLOWED",
            seen=origin[:100],
            allowed=f"the origin {host}, or none",
        )


READ = (400, 401, 403, 404, 409, 421)
"""Error codes of any operation that needs a key."""
WRITE = (*READ, 413, 415, 429, 503, 504)
"""Error codes of an operation that takes a body or generates."""
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"api_key": []}]
SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "The gateway's token, or the key of a session, which opens that session "
        "only.",
    },
    "api_key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same, as Anthropic has it.",
    },
}


@functools.cache
def document() -> dict[str, Any]:
    """The document, made once."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline's rollout gateway",
            "version": version("paceline"),
            "description": "Any client of OpenAI's or Anthropic's API can talk to it; what it "
            "generates is trained.",
        },
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": SCHEMES},
        "security": SECURITY,
    }


async def show(request: Request) -> Response:
    """GET /openapi.json; it needs no key."""
    return JSONResponse(document())


def _described(operation: Operation) -> dict[str, Any]:
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    required = {
        "in": "path",
        "required": True,
        "schema": {**TEXT, "minLength": 1, "pattern": "^[^/]+$"},
    }
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "parameters": [*({"name": name, **required} for name in names), *operation.query],
        "responses": _responses(operation),
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": any(field.is_required() for field in operation.body.model_fields.values()),
            "content": _json(operation.body.__name__),
        }

    if operation.open:
        described["security"] = []
    return described


def _operation_id(operation: Operation) -> str:
    words = [part.strip("{}") for part in operation.path.split("/") if part and part != "v1"]
    return "_".join([operation.method, *words])


def _responses(operation: Operation) -> dict[str, Any]:
    content = _json(operation.answer)
    if operation.streams:
        content["text/event-stream"] = {"schema": EVENT}
    found: dict[str, Any] = {str(operation.status): {"description": "Done.", "content": content}}
    if operation.empty:
        found["204"] = {"description": operation.empty}
    if operation.open:
        found["503"] = {"description": "No worker serves yet.", "content": _json(operation.answer)}
        return found
    shape = "AnthropicError" if operation.anthropic else "Error"
    for status in WRITE if operation.method == "post" else READ:
        found[str(status)] = {"description": HTTPStatus(status).phrase, "content": _json(shape)}
    return found


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _schemas() -> dict[str, Schema]:
    kinds: Sequence[type[BaseModel]] = [one.body for one in OPERATIONS if one.body is not None]
    _, made = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    return {**made["$defs"], **ANSWERS}


log = telemetry.get_logger(__name__)


def build_app(gateway: Gateway, *, loopback: bool = True) -> Observed:
    """The ASGI application. `loopback`: it listens on a loopback address."""
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        PacelineError: _on_error,
        HTTPException: _on_http,
        Exception: _on_defect,
    }
    app = Starlette(routes=routes(), exception_handlers=handlers)
    app.state.gateway, app.state.past_responses = gateway, responses.PastResponses(gateway.names)
    origins = gateway.config.api.cors_origins
    sited: ASGIApp = SameSite(Told(app), loopback=loopback, origins=origins)
    return Observed(_for_browsers(sited, origins) if origins else sited)


def _for_browsers(app: ASGIApp, origins: Sequence[str]) -> CORSMiddleware:
    """Answers preflight requests of pages from these origins, and lets the pages read the
    answers.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", *TOLD],
    )


def routes() -> list[Route]:
    """Every path and its handler."""
    return [
        Route("/metrics", operators.metrics),
        Route("/openapi.json", show),
        *(Route(one.path, one.handler, methods=[one.method]) for one in OPERATIONS),
    ]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return answers.answer(error, request)


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer a path or a method that is not served."""
    assert isinstance(error, HTTPException)
    kinds = {404: "no such path", 405: "the path does not take this method"}
    text = kinds.get(error.status_code, error.detail)
    problem = NotFound(text, seen=f"{request.method} {request.url.path}"[:200])
    answer = answers.answer(problem, request)
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer


async def _on_defect(request: Request, error: Exception) -> Response:
    """Answer an internal fault: its traceback is logged, not sent."""
    log.error("a request failed", path=request.url.path, exc_info=error)
    return answers.answer(InternalError("the gateway failed; its log says why"), request)
