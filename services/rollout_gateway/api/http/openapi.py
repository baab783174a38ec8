"""The published OpenAPI 3.1 document. Owns the table of operations; bodies describe themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_gateway.api.http import sessions
from rollout_gateway.api.http.anthropic.schema import ConversationBody, MessagesBody
from rollout_gateway.api.http.openai.schema import ChatBody, CompletionBody
from rollout_gateway.api.http.openapi_answers import ANSWERS, EVENT, TEXT, Schema
from rollout_gateway.api.http.responses.schema import ResponsesBody

READ = (400, 401, 403, 404, 409)
"""Errors of any operation that needs a key."""
WRITE = (*READ, 413, 429, 503, 504)
"""Errors of one that takes a body or makes the model speak."""
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
FORM = {"name": "form", "in": "query", "schema": {"enum": ["tree", "samples"], "default": "tree"}}


@dataclass(frozen=True, slots=True)
class Operation:
    """What one path does with one method."""

    method: str
    path: str
    summary: str
    answer: str  # name of the schema of what it answers
    body: type[BaseModel] | None = None
    status: int = 200
    errors: tuple[int, ...] = WRITE
    streams: bool = False  # the body may ask for events
    query: tuple[Schema, ...] = ()
    empty: str = ""  # when it answers 204

    @property
    def anthropic(self) -> bool:
        """Whether errors have Anthropic's shape."""
        return self.path.startswith("/v1/messages")


ONE_SESSION = "/v1/sessions/{id}"
OPERATIONS = (
    Operation("get", "/health", "200 while a worker serves, else 503", "Health", errors=()),
    Operation("get", "/v1/models", "The model that is served", "ModelList", errors=READ),
    Operation("get", "/v1/models/{name}", "One model", "Model", errors=READ),
    Operation(
        "post",
        "/v1/completions",
        "OpenAI's completions",
        "Completion",
        CompletionBody,
        streams=True,
    ),
    Operation(
        "post", "/v1/chat/completions", "OpenAI's chat", "ChatCompletion", ChatBody, streams=True
    ),
    Operation(
        "post", "/v1/responses", "OpenAI's responses", "Response", ResponsesBody, streams=True
    ),
    Operation("get", "/v1/responses/{id}", "A stored response", "Response", errors=READ),
    Operation(
        "delete", "/v1/responses/{id}", "Forget a stored response", "DeletedResponse", errors=READ
    ),
    Operation(
        "post", "/v1/messages", "Anthropic's messages", "Message", MessagesBody, streams=True
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Tokens of a conversation",
        "TokenCount",
        ConversationBody,
    ),
    Operation(
        "post",
        "/v1/sessions",
        "Open a session",
        "OpenedSession",
        sessions.OpenBody,
        status=201,
        empty="No task came in time.",
    ),
    Operation("get", ONE_SESSION, "A session", "Session", errors=READ),
    Operation(
        "get",
        f"{ONE_SESSION}/export",
        "Its tree or samples",
        "SessionExport",
        errors=READ,
        query=(FORM,),
    ),
    Operation(
        "post",
        f"{ONE_SESSION}/reward",
        "Reward it or one of its turns",
        "Session",
        sessions.RewardBody,
    ),
    Operation(
        "post",
        f"{ONE_SESSION}/complete",
        "End it: final or unscored",
        "Session",
        sessions.CompleteBody,
    ),
    Operation("post", f"{ONE_SESSION}/abort", "End it: aborted", "Session"),
    Operation("post", f"{ONE_SESSION}/fail", "End it: failed", "Session", sessions.FailBody),
    Operation(
        "post", "/v1/rewards", "Reward a completion", "Session", sessions.CompletionRewardBody
    ),
)


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


def route() -> Route:
    """GET /openapi.json; it needs no key."""

    async def show(request: Request) -> Response:
        return JSONResponse(document())

    return Route("/openapi.json", show)


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
    if not operation.errors:
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
    if not operation.errors:
        found["503"] = {"description": "No worker serves yet.", "content": _json(operation.answer)}
    shape = "AnthropicError" if operation.anthropic else "Error"
    for status in operation.errors:
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
