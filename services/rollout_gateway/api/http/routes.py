"""Lists the operations of the HTTP API with their handlers and documentation.

The application's routes and the OpenAPI document are both built from this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from paceline.services.rollout_gateway.api.http import operators, sessions
from paceline.services.rollout_gateway.api.http.anthropic.answers import AnthropicAnswers
from paceline.services.rollout_gateway.api.http.anthropic.counting import count_tokens
from paceline.services.rollout_gateway.api.http.anthropic.schema import (
    ConversationBody,
    MessagesBody,
)
from paceline.services.rollout_gateway.api.http.openai.answers import ChatAnswers, CompletionAnswers
from paceline.services.rollout_gateway.api.http.openai.schema import ChatBody, CompletionBody
from paceline.services.rollout_gateway.api.http.openai.tokens import (
    DetokenizeBody,
    TokenizeBody,
    detokenize,
    tokenize,
)
from paceline.services.rollout_gateway.api.http.openapi_answers import FORM, Schema
from paceline.services.rollout_gateway.api.http.responses import store
from paceline.services.rollout_gateway.api.http.responses.answers import ResponsesAnswers
from paceline.services.rollout_gateway.api.http.responses.schema import ResponsesBody
from paceline.services.rollout_gateway.api.http.streaming import Handler, generating


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
        operators.health,
        "200 while a worker serves, else 503",
        "Health",
        open=True,
    ),
    Operation("get", "/v1/models", operators.models, "The model that is served", "ModelList"),
    Operation("get", "/v1/models/{name}", operators.model, "One model", "Model"),
    Operation("get", "/version", operators.version, "The version that answers", "Version"),
    Operation("post", "/tokenize", tokenize, "Tokens of a text or chat", "Tokens", TokenizeBody),
    Operation("post", "/detokenize", detokenize, "Text of tokens", "Text", DetokenizeBody),
    _speaks(
        "/v1/completions", "OpenAI's completions", "Completion", CompletionAnswers, CompletionBody
    ),
    _speaks("/v1/chat/completions", "OpenAI's chat", "ChatCompletion", ChatAnswers, ChatBody),
    _speaks("/v1/responses", "OpenAI's responses", "Response", ResponsesAnswers, ResponsesBody),
    Operation("get", _STORED, store.show, "A stored response", "Response"),
    Operation("delete", _STORED, store.delete, "Forget a stored response", "DeletedResponse"),
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
