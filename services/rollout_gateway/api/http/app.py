"""Makes the ASGI application: its operations, their OpenAPI document and the layer around requests.

A page of another site could send a request without a preflight: its Host or Origin is foreign
(`paceline.rpc.http_requests`), or its body is no JSON (see requests.py).
"""

import functools
import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import telemetry
from paceline.errors import PacelineError
from paceline.rpc.http_requests import check_site, error_handlers
from paceline.services.rollout_gateway import metrics as instruments
from paceline.services.rollout_gateway.api.http import (
    answers,
    anthropic,
    openai,
    requests,
    responses,
    sessions,
    tokens,
)
from paceline.services.rollout_gateway.api.http.streaming import Handler, generating
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.telemetry import extract, names, span

SCRAPE_DEADLINE_S = 5.0
"""Maximum seconds of a worker's answer to a scrape; a later worker keeps its last values.
Prometheus itself waits 10 s by default.
"""


async def health(request: Request) -> Response:
    """200 while at least one worker serves."""
    gateway = requests.gateway_of(request)
    ready = len(gateway.router.processes())
    body = {"status": "ok" if ready else "starting", "model": gateway.model, "workers": ready}
    return JSONResponse(body, status_code=200 if ready else 503)


async def models(request: Request) -> Response:
    """The served model, under each of its names."""
    await requests.caller_of(request)
    names = requests.model_names(requests.gateway_of(request))
    return JSONResponse({"object": "list", "data": [_model(request, name) for name in names]})


async def model(request: Request) -> Response:
    """The model of that name."""
    await requests.caller_of(request)
    name = str(request.path_params["name"])
    requests.check_model(requests.gateway_of(request), name)
    return JSONResponse(_model(request, name))


async def version(request: Request) -> Response:
    """The version of Paceline."""
    await requests.caller_of(request)
    return JSONResponse({"version": importlib.metadata.version("paceline")})


async def show_metrics(request: Request) -> Response:
    """Every instrument of the process in Prometheus text format; polls the workers first."""
    await requests.require_token(request)
    await requests.gateway_of(request).router.healths(SCRAPE_DEADLINE_S)
    return Response(telemetry.prometheus_page(), media_type=telemetry.PROMETHEUS_TYPE)


def _model(request: Request, name: str) -> dict[str, Any]:
    gateway = requests.gateway_of(request)
    longest = gateway.router.ready.max_sequence_tokens
    about = {"created": 0, "owned_by": "paceline", "max_model_len": longest}
    return {"id": name, "object": "model", **about}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    statuses: tuple[int, ...] = (200,)  # besides errors
    query: tuple[dict[str, Any], ...] = ()
    open: bool = False  # needs no key


def _post(path: str, handler: Handler, summary: str, body: Any = None, *ok: int) -> Operation:
    return Operation("post", path, handler, summary, body, ok or (200,))


def _generate(path: str, summary: str, kind: type[Any]) -> Operation:
    return _post(path, generating(kind), summary, kind.body_type)


_ONE = "/v1/sessions/{id}"
_STORED, _COUNT = "/v1/responses/{id}", "/v1/messages/count_tokens"
_OPEN = "Open a session; 204: no task in time"
_REWARDS, _REWARD = "/v1/rewards", "Reward a completion"
_FORM = {"name": "form", "in": "query", "schema": {"enum": ["tree", "samples"], "default": "tree"}}
OPERATIONS = (
    Operation("get", "/health", health, "Whether a worker serves", statuses=(200, 503), open=True),
    Operation("get", "/v1/models", models, "The served model under each name"),
    Operation("get", "/v1/models/{name}", model, "One model"),
    Operation("get", "/version", version, "The version of Paceline"),
    _post("/tokenize", tokens.tokenize, "Tokens of a text or chat", tokens.TokenizeBody),
    _post("/detokenize", tokens.detokenize, "Text of tokens", tokens.DetokenizeBody),
    _generate("/v1/completions", "OpenAI's completions", openai.CompletionAnswers),
    _generate("/v1/chat/completions", "OpenAI's chat", openai.ChatAnswers),
    _generate("/v1/responses", "OpenAI's responses", responses.ResponsesAnswers),
    Operation("get", _STORED, responses.show, "A stored response"),
    Operation("delete", _STORED, responses.delete, "Delete a stored response"),
    _generate("/v1/messages", "Anthropic's messages", anthropic.AnthropicAnswers),
    _post(_COUNT, tokens.count_tokens, "Tokens of a conversation", anthropic.ConversationBody),
    _post("/v1/sessions", sessions.open_session, _OPEN, sessions.OpenBody, 201, 204),
    Operation("get", _ONE, sessions.show, "A session"),
    Operation("get", f"{_ONE}/export", sessions.export, "Its tree or samples", query=(_FORM,)),
    _post(f"{_ONE}/reward", sessions.reward, "Reward it or a turn", sessions.RewardBody),
    _post(f"{_ONE}/complete", sessions.complete, "Complete it", sessions.CompleteBody),
    _post(f"{_ONE}/abort", sessions.abort, "Abort it"),
    _post(f"{_ONE}/fail", sessions.fail, "End it as failed", sessions.FailBody),
    _post(_REWARDS, sessions.completion_reward, _REWARD, sessions.CompletionRewardBody),
)


NOTED = {"x-paceline-ignored": "ignored", "x-paceline-overridden": "overridden"}
"""Header of an answer -> attribute of the request's state, a sequence of texts."""


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
        instruments.HTTP_OPEN.record(1)
        try:
            with span(names.HTTP_REQUEST, about, kind="server", parent=extract(carrier)) as current:
                try:
                    request, app = Request(scope), self._app
                    try:
                        check_site(request, loopback=self._loopback, origins=self._origins)
                    except PacelineError as error:
                        app = answers.answer(error, request)
                    await app(scope, receive, watched)
                finally:
                    current.set_attribute(names.HTTP_ROUTE, _route(scope))
                    current.set_attribute(names.HTTP_STATUS, status)
        finally:
            instruments.HTTP_OPEN.record(-1)
            labels = {"route": _route(scope), "status": str(status)}
            instruments.HTTP_REQUESTS.record(**labels)
            instruments.HTTP_DURATION.record(time.perf_counter() - started, **labels)


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
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
        bodies += [operation.body] if operation.body is not None else []
    template, release = "#/components/schemas/{model}", importlib.metadata.version("paceline")
    _, made = models_json_schema([(one, "validation") for one in bodies], ref_template=template)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline's rollout gateway", "version": release},
        "paths": paths,
        "components": {"schemas": made["$defs"], "securitySchemes": SCHEMES},
        "security": [{name: []} for name in SCHEMES],
    }


async def show_document(request: Request) -> Response:
    """GET /openapi.json; it needs no key."""
    return JSONResponse(document())


def _described(operation: Operation) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1, "pattern": "^[^/]+$"}
    named = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    errors = () if operation.open else WRITE if operation.method == "post" else READ
    place = {"in": "path", "required": True, "schema": text}
    phrases = {one: HTTPStatus(one).phrase for one in (*operation.statuses, *errors)}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [*({"name": name, **place} for name in named), *operation.query],
        "responses": {str(one): {"description": phrase} for one, phrase in phrases.items()},
    }
    if operation.body is not None:
        reference = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        required = any(field.is_required() for field in operation.body.model_fields.values())
        content = {"application/json": {"schema": reference}}
        described["requestBody"] = {"required": required, "content": content}
    if operation.open:
        described["security"] = []
    return described


def build_app(gateway: Gateway, *, loopback: bool = True) -> ASGIApp:
    """The ASGI application. `loopback`: it listens on a loopback address. Pages from configured
    origins get answers to their preflight requests and may read the answers.
    """
    app = Starlette(routes=all_routes(), exception_handlers=error_handlers(answers.answer))
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
    more = [Route("/metrics", show_metrics), Route("/openapi.json", show_document)]
    return more + [Route(one.path, one.handler, methods=[one.method]) for one in OPERATIONS]
