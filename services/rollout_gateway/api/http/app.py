"""Makes the ASGI application: its routes, its OpenAPI document and the layer around requests.

On loopback the gateway trusts every client, and a page in its user's browser can reach it too. Such
a page may use its own name that resolves to loopback (DNS rebinding): its Host is foreign. Or it
sends a request without a preflight: its Origin is foreign, or its body is no JSON (see
requests.py).
"""

import functools
import time
from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
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
from paceline.services.rollout_gateway.api.http import answers, responses, routes
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.telemetry import extract, names, span

NOTED = {"x-paceline-ignored": "ignored", "x-paceline-overridden": "overridden"}
"""Header of an answer -> attribute of the request's state, a sequence of texts."""
log = telemetry.get_logger(__name__)


class HttpFront:
    """An ASGI application around the routes: checks the site of a request, adds the noted headers
    to its answer, and records its metrics and span.

    `loopback`: the server only listens on this machine. `origins`: sites with access; "*" allows
    all sites.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool, origins: Sequence[str]) -> None:
        self._app = app
        self._loopback = loopback
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # the client disconnected before an answer

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers, state = MutableHeaders(scope=message), scope.get("state", {})
                for name, noted in NOTED.items():
                    if texts := state.get(noted):
                        headers[name] = ", ".join(texts)
            await send(message)

        started = time.perf_counter()
        about = {names.HTTP_METHOD: scope["method"]}
        carrier = dict(Request(scope).headers)
        metrics.HTTP_OPEN.record(1)
        try:
            with span(names.HTTP_REQUEST, about, kind="server", parent=extract(carrier)) as current:
                try:
                    await self._answer(scope, receive, watched)
                finally:
                    current.set_attribute(names.HTTP_ROUTE, _route(scope))
                    current.set_attribute(names.HTTP_STATUS, status)
        finally:
            metrics.HTTP_OPEN.record(-1)
            labels = {"route": _route(scope), "status": str(status)}
            metrics.HTTP_REQUESTS.record(**labels)
            metrics.HTTP_DURATION.record(time.perf_counter() - started, **labels)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, app = Request(scope), self._app
        try:
            self._check_site(request)
        except InvalidInput as error:
            app = answers.answer(error, request)
        await app(scope, receive, send)

    def _check_site(self, request: Request) -> None:
        """Raises InvalidInput (NOT_ALLOWED) for a foreign Host on loopback, or a foreign Origin
        outside the given origins.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self._loopback and not names_loopback(host):
            raise InvalidInput(
                "the Host header names another machine than this one",
                reason="NOT_ALLOWED",
                seen=host[:100],
                allowed="localhost or a loopback address",
            )
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if urlsplit(origin).netloc.lower() != host.lower():
            raise InvalidInput(
                "the page of another site sent this request",
                reason="NOT_ALLOWED",
                seen=origin[:100],
                allowed=f"the origin {host}, or none",
            )


def _route(scope: Scope) -> str:
    """The route's pattern. Unknown paths share one name, so that strangers cannot flood the
    metrics.
    """
    return str(getattr(scope.get("route"), "path", "none"))


READ = (400, 401, 403, 404, 409, 421)
"""Error codes of any operation that needs a key."""
WRITE = (*READ, 413, 415, 429, 503, 504)
"""Error codes of an operation that takes a body or generates."""
BEARER = "The gateway's token, or the key of a session, which opens that session only."
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": BEARER},
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI document, made once: requests with their schemas, answers with their statuses."""
    paths: dict[str, dict[str, Any]] = {}
    bodies: list[type[BaseModel]] = []
    for operation in routes.OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
        bodies += [operation.body] if operation.body is not None else []
    _, made = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline's rollout gateway", "version": version("paceline")},
        "paths": paths,
        "components": {"schemas": made["$defs"], "securitySchemes": SCHEMES},
        "security": [{name: []} for name in SCHEMES],
    }


async def show(request: Request) -> Response:
    """GET /openapi.json; it needs no key."""
    return JSONResponse(document())


def _described(operation: routes.Operation) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1, "pattern": "^[^/]+$"}
    named = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    errors = () if operation.open else WRITE if operation.method == "post" else READ
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": text} for name in named),
            *operation.query,
        ],
        "responses": {
            str(status): {"description": HTTPStatus(status).phrase}
            for status in (*operation.statuses, *errors)
        },
    }
    if operation.body is not None:
        reference = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        described["requestBody"] = {
            "required": any(field.is_required() for field in operation.body.model_fields.values()),
            "content": {"application/json": {"schema": reference}},
        }
    if operation.open:
        described["security"] = []
    return described


def build_app(gateway: Gateway, *, loopback: bool = True) -> ASGIApp:
    """The ASGI application. `loopback`: it listens on a loopback address. Pages from configured
    origins get answers to their preflight requests and may read the answers.
    """
    kinds: tuple[type[Exception], ...] = (PacelineError, HTTPException, Exception)
    app = Starlette(routes=all_routes(), exception_handlers=dict.fromkeys(kinds, _answer_error))
    app.state.gateway, app.state.past_responses = gateway, responses.PastResponses(gateway.names)
    origins = gateway.config.api.cors_origins
    front = HttpFront(app, loopback=loopback, origins=origins)
    if not origins:
        return front
    return CORSMiddleware(
        front,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", *NOTED],
    )


def all_routes() -> list[Route]:
    """Every path and its handler."""
    return [
        Route("/metrics", routes.metrics),
        Route("/openapi.json", show),
        *(Route(one.path, one.handler, methods=[one.method]) for one in routes.OPERATIONS),
    ]


async def _answer_error(request: Request, error: Exception) -> Response:
    """The answer to an error, to a path or method that is not served, or to an internal fault. The
    traceback of a fault is logged, not sent.
    """
    if isinstance(error, PacelineError):
        return answers.answer(error, request)
    if not isinstance(error, HTTPException):
        log.error("a request failed", path=request.url.path, exc_info=error)
        return answers.answer(InternalError("the gateway failed; its log has the cause"), request)
    kinds = {404: "no such path", 405: "the path does not take this method"}
    text = kinds.get(error.status_code, error.detail)
    problem = NotFound(text, seen=f"{request.method} {request.url.path}"[:200])
    answer = answers.answer(problem, request)
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer
