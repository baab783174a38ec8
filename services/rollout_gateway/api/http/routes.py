"""Lists the operations of the HTTP API with their handlers and the schemas of their answers.

The application's routes and the OpenAPI document are both built from this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version as distribution_version
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import telemetry
from paceline.services.rollout_gateway.api.http import responses, sessions
from paceline.services.rollout_gateway.api.http.anthropic import AnthropicAnswers
from paceline.services.rollout_gateway.api.http.anthropic_schema import (
    ConversationBody,
    MessagesBody,
)
from paceline.services.rollout_gateway.api.http.openai import ChatAnswers, CompletionAnswers
from paceline.services.rollout_gateway.api.http.openai_schema import ChatBody, CompletionBody
from paceline.services.rollout_gateway.api.http.requests import (
    caller_of,
    check_model,
    gateway_of,
    model_names,
    require_token,
)
from paceline.services.rollout_gateway.api.http.responses import ResponsesAnswers
from paceline.services.rollout_gateway.api.http.responses_schema import ResponsesBody
from paceline.services.rollout_gateway.api.http.streaming import Handler, generating
from paceline.services.rollout_gateway.api.http.tokens import (
    DetokenizeBody,
    TokenizeBody,
    count_tokens,
    detokenize,
    tokenize,
)

SCRAPE_DEADLINE_S = 5.0
"""Maximum seconds of a worker's answer to a scrape; a later worker keeps its last values.
Prometheus itself waits 10 s by default.
"""


async def health(request: Request) -> Response:
    """200 while at least one worker serves."""
    gateway = gateway_of(request)
    ready = len(gateway.router.processes())
    body = {"status": "ok" if ready else "starting", "model": gateway.model, "workers": ready}
    return JSONResponse(body, status_code=200 if ready else 503)


async def models(request: Request) -> Response:
    """The served model, under each of its names."""
    await caller_of(request)
    names = model_names(gateway_of(request))
    return JSONResponse({"object": "list", "data": [_model(request, name) for name in names]})


async def model(request: Request) -> Response:
    """The model of that name."""
    await caller_of(request)
    name = str(request.path_params["name"])
    check_model(gateway_of(request), name)
    return JSONResponse(_model(request, name))


async def version(request: Request) -> Response:
    """The version of Paceline."""
    await caller_of(request)
    return JSONResponse({"version": distribution_version("paceline")})


async def metrics(request: Request) -> Response:
    """Every instrument of the process in Prometheus text format; polls the workers first."""
    await require_token(request)
    await gateway_of(request).router.healths(SCRAPE_DEADLINE_S)
    return Response(telemetry.prometheus_page(), media_type=telemetry.PROMETHEUS_TYPE)


def _model(request: Request, name: str) -> dict[str, Any]:
    gateway = gateway_of(request)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "paceline",
        "max_model_len": gateway.router.ready.max_sequence_tokens,
    }


Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}


def optional(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def listed(schema: Schema) -> Schema:
    """A list of items with the schema."""
    return {"type": "array", "items": schema}


def fields(**properties: Schema) -> Schema:
    """An object with at least these fields."""
    return {"type": "object", "properties": properties, "required": sorted(properties)}


EVENT: Schema = fields(
    data={"type": "string", "description": "JSON, or [DONE] where completions end."}
)
"""One server-sent event."""


def constant(value: str) -> Schema:
    """A constant text."""
    return {"type": "string", "const": value}


def _named(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _choices(kind: str, **said: Schema) -> Schema:
    """An answer with several choices."""
    return fields(
        id=TEXT,
        object=constant(kind),
        created=WHOLE,
        model=TEXT,
        choices=listed(fields(index=WHOLE, **said, finish_reason=optional(TEXT))),
        usage=fields(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE),
    )


_RESPONSES_USAGE = fields(input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE)
_MESSAGES_USAGE = fields(input_tokens=WHOLE, output_tokens=WHOLE, cache_read_input_tokens=WHOLE)
_MESSAGE = {**fields(role=constant("assistant"), content=optional(TEXT))}
_ERROR = fields(message=TEXT, type=TEXT, param=optional(TEXT), code=optional(TEXT))
_TURN = fields(
    completion_id=TEXT,
    parent=optional(TEXT),
    prompt_ids=listed(WHOLE),
    response_ids=listed(WHOLE),
    behavior_logprobs=listed(NUMBER),
    version_spans=listed(listed(WHOLE)),
    draw_spans=listed(listed(ANY)),
    finish_reason=TEXT,
    message=optional(ANY),
    reward=optional(NUMBER),
)
_SAMPLE = fields(
    token_ids=listed(WHOLE),
    loss_mask=listed(WHOLE),
    behavior_logprobs=listed(NUMBER),
    reward=optional(NUMBER),
)
_RESPONSE_STATUS = {"enum": ["completed", "incomplete", "failed", "in_progress"]}
_STOP_REASON = {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}

ANSWERS: dict[str, Schema] = {
    "Error": fields(error=_ERROR),
    "AnthropicError": fields(type=constant("error"), error=fields(type=TEXT, message=TEXT)),
    "Health": fields(status={"enum": ["ok", "starting"]}, model=TEXT, workers=WHOLE),
    "Model": fields(
        id=TEXT, object=constant("model"), created=WHOLE, owned_by=TEXT, max_model_len=WHOLE
    ),
    "Version": fields(version=TEXT),
    "Tokens": fields(count=WHOLE, max_model_len=WHOLE, tokens=listed(WHOLE)),
    "Text": fields(prompt=TEXT),
    "ModelList": fields(object=constant("list"), data=listed(_named("Model"))),
    "Completion": _choices("text_completion", text=TEXT),
    "ChatCompletion": _choices("chat.completion", message=_MESSAGE),
    "Response": fields(
        id=TEXT,
        object=constant("response"),
        created_at=WHOLE,
        status=_RESPONSE_STATUS,
        model=TEXT,
        output=listed(
            fields(id=TEXT, type={"enum": ["reasoning", "message", "function_call"]}, status=TEXT)
        ),
        usage=optional(_RESPONSES_USAGE),
        metadata=ANY,
    ),
    "DeletedResponse": fields(id=TEXT, object=constant("response"), deleted=FLAG),
    "Message": fields(
        id=TEXT,
        type=constant("message"),
        role=constant("assistant"),
        model=TEXT,
        content=listed(fields(type={"enum": ["thinking", "text", "tool_use"]})),
        stop_reason=_STOP_REASON,
        stop_sequence=optional(TEXT),
        usage=_MESSAGES_USAGE,
    ),
    "TokenCount": fields(input_tokens=WHOLE),
    "Session": fields(id=TEXT, object=constant("session"), state=TEXT, fail_reason=optional(TEXT)),
    "OpenedSession": fields(
        id=TEXT,
        object=constant("session"),
        state=TEXT,
        api_key=TEXT,
        group_id=TEXT,
        task=optional(fields(id=TEXT, prompt=TEXT, metadata=ANY)),
    ),
    "SessionExport": {
        "allOf": [
            _named("Session"),
            {"anyOf": [fields(tree=listed(_TURN)), fields(samples=listed(_SAMPLE))]},
        ]
    },
}
"""Schemas by name, as in `components.schemas`."""
FORM = {"name": "form", "in": "query", "schema": {"enum": ["tree", "samples"], "default": "tree"}}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    summary: str
    answer: str  # name of the answer's schema
    body: type[BaseModel] | None = None
    status: int = 200
    open: bool = False  # needs no key
    streams: bool = False  # the body may request events
    query: tuple[Schema, ...] = ()
    empty: str = ""  # description of the answer 204, if it exists

    @property
    def anthropic(self) -> bool:
        """Whether errors have Anthropic's format."""
        return self.path.startswith("/v1/messages")


def _speaks(path: str, summary: str, answer: str, kind: type[Any], body: type[Any]) -> Operation:
    """An operation that generates."""
    return Operation("post", path, generating(kind, body), summary, answer, body, streams=True)


def _of_session(
    what: str, handler: Handler, summary: str, body: type[BaseModel] | None = None
) -> Operation:
    """An operation that changes a session."""
    return Operation("post", f"{_ONE}/{what}", handler, summary, "Session", body)


_ONE = "/v1/sessions/{id}"
_STORED = "/v1/responses/{id}"
OPERATIONS = (
    Operation(
        "get",
        "/health",
        health,
        "200 while a worker serves, else 503",
        "Health",
        open=True,
    ),
    Operation("get", "/v1/models", models, "The model that is served", "ModelList"),
    Operation("get", "/v1/models/{name}", model, "One model", "Model"),
    Operation("get", "/version", version, "The version that answers", "Version"),
    Operation("post", "/tokenize", tokenize, "Tokens of a text or chat", "Tokens", TokenizeBody),
    Operation("post", "/detokenize", detokenize, "Text of tokens", "Text", DetokenizeBody),
    _speaks(
        "/v1/completions", "OpenAI's completions", "Completion", CompletionAnswers, CompletionBody
    ),
    _speaks("/v1/chat/completions", "OpenAI's chat", "ChatCompletion", ChatAnswers, ChatBody),
    _speaks("/v1/responses", "OpenAI's responses", "Response", ResponsesAnswers, ResponsesBody),
    Operation("get", _STORED, responses.show, "A stored response", "Response"),
    Operation("delete", _STORED, responses.delete, "Forget a stored response", "DeletedResponse"),
    _speaks("/v1/messages", "Anthropic's messages", "Message", AnthropicAnswers, MessagesBody),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        count_tokens,
        "Tokens of a conversation",
        "TokenCount",
        ConversationBody,
    ),
    Operation(
        "post",
        "/v1/sessions",
        sessions.open_session,
        "Open a session",
        "OpenedSession",
        sessions.OpenBody,
        status=201,
        empty="No task came in time.",
    ),
    Operation("get", _ONE, sessions.show, "A session", "Session"),
    Operation(
        "get",
        f"{_ONE}/export",
        sessions.export,
        "Its tree or samples",
        "SessionExport",
        query=(FORM,),
    ),
    _of_session("reward", sessions.reward, "Reward it or one of its turns", sessions.RewardBody),
    _of_session("complete", sessions.complete, "End it: final or unscored", sessions.CompleteBody),
    _of_session("abort", sessions.abort, "End it: aborted"),
    _of_session("fail", sessions.fail, "End it: failed", sessions.FailBody),
    Operation(
        "post",
        "/v1/rewards",
        sessions.completion_reward,
        "Reward a completion",
        "Session",
        sessions.CompletionRewardBody,
    ),
)
