"""Lists the operations of the HTTP API with their handlers.

The application's routes and the OpenAPI document are both built from this list.
"""

from dataclasses import dataclass
from importlib.metadata import version as distribution_version
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import telemetry
from paceline.services.rollout_gateway.api.http import (
    anthropic,
    anthropic_schema,
    openai,
    requests,
    responses,
    sessions,
    tokens,
)
from paceline.services.rollout_gateway.api.http.streaming import Handler, generating

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
    return JSONResponse({"version": distribution_version("paceline")})


async def metrics(request: Request) -> Response:
    """Every instrument of the process in Prometheus text format; polls the workers first."""
    await requests.require_token(request)
    await requests.gateway_of(request).router.healths(SCRAPE_DEADLINE_S)
    return Response(telemetry.prometheus_page(), media_type=telemetry.PROMETHEUS_TYPE)


def _model(request: Request, name: str) -> dict[str, Any]:
    gateway = requests.gateway_of(request)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "paceline",
        "max_model_len": gateway.router.ready.max_sequence_tokens,
    }


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


def _generate(path: str, summary: str, answers: type[Any]) -> Operation:
    return Operation("post", path, generating(answers), summary, answers.body_type)


_ONE = "/v1/sessions/{id}"
_STORED = "/v1/responses/{id}"
_FORM = {"name": "form", "in": "query", "schema": {"enum": ["tree", "samples"], "default": "tree"}}
OPERATIONS = (
    Operation("get", "/health", health, "Whether a worker serves", statuses=(200, 503), open=True),
    Operation("get", "/v1/models", models, "The served model under each name"),
    Operation("get", "/v1/models/{name}", model, "One model"),
    Operation("get", "/version", version, "The version of Paceline"),
    Operation(
        "post", "/tokenize", tokens.tokenize, "Tokens of a text or chat", tokens.TokenizeBody
    ),
    Operation("post", "/detokenize", tokens.detokenize, "Text of tokens", tokens.DetokenizeBody),
    _generate("/v1/completions", "OpenAI's completions", openai.CompletionAnswers),
    _generate("/v1/chat/completions", "OpenAI's chat", openai.ChatAnswers),
    _generate("/v1/responses", "OpenAI's responses", responses.ResponsesAnswers),
    Operation("get", _STORED, responses.show, "A stored response"),
    Operation("delete", _STORED, responses.delete, "Delete a stored response"),
    _generate("/v1/messages", "Anthropic's messages", anthropic.AnthropicAnswers),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        tokens.count_tokens,
        "Tokens of a conversation",
        anthropic_schema.ConversationBody,
    ),
    Operation(
        "post",
        "/v1/sessions",
        sessions.open_session,
        "Open a session; 204: no task in time",
        sessions.OpenBody,
        statuses=(201, 204),
    ),
    Operation("get", _ONE, sessions.show, "A session"),
    Operation("get", f"{_ONE}/export", sessions.export, "Its tree or samples", query=(_FORM,)),
    Operation(
        "post", f"{_ONE}/reward", sessions.reward, "Reward it or a turn", sessions.RewardBody
    ),
    Operation("post", f"{_ONE}/complete", sessions.complete, "Complete it", sessions.CompleteBody),
    Operation("post", f"{_ONE}/abort", sessions.abort, "Abort it"),
    Operation("post", f"{_ONE}/fail", sessions.fail, "End it as failed", sessions.FailBody),
    Operation(
        "post",
        "/v1/rewards",
        sessions.completion_reward,
        "Reward a completion",
        sessions.CompletionRewardBody,
    ),
)
