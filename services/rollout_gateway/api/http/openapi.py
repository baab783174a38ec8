"""Publishes the operations as an OpenAPI 3.1 document; the schemas of bodies are generated."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.services.rollout_gateway.api.http.openapi_answers import ANSWERS, EVENT, TEXT, Schema
from paceline.services.rollout_gateway.api.http.routes import OPERATIONS, Operation

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
