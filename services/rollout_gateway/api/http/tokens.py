"""Tokenizes, detokenizes and counts tokens without generation, in the formats of vLLM and
Anthropic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.services.rollout_gateway.api.http import requests
from paceline.services.rollout_gateway.api.http.anthropic_schema import ConversationBody
from paceline.services.rollout_gateway.api.http.beyond import TOKENS
from paceline.services.rollout_gateway.api.http.openai_schema import ChatMessage, ToolBody
from paceline.services.rollout_gateway.api.http.requests import caller_of, check_model, gateway_of
from paceline.services.rollout_gateway.api.http.shapes import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Several,
    StrictShape,
)
from paceline.services.rollout_gateway.chat.messages import ChatRequest
from paceline.services.rollout_gateway.gateway import Gateway

CONTEXTS = 8
"""Longest text or list of ids, as a multiple of the model's context."""
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class TokenizeBody(StrictShape):
    """POST /tokenize: a text, or a conversation under the chat template."""

    beyond = TOKENS
    alone: ClassVar[Mapping[str, str]] = {"prompt": "string", "messages": "array"}
    model: str | None = None
    prompt: str | None = None
    messages: Several[ChatMessage] | None = Field(None, max_length=MAX_MESSAGES)
    tools: Several[ToolBody] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool = True

    def ids(self, gateway: Gateway, longest: int) -> tuple[int, ...]:
        """The ids of the text or conversation. Raises InvalidInput above `longest` ids."""
        if self.messages is not None:
            messages = tuple(one.message() for one in self.messages)
            tools = tuple(one.function.shown() for one in self.tools or ())
            return gateway.planner.prompts.encode(ChatRequest(messages, tools), longest)
        return gateway.codec.encode(self.prompt or "", longest, special=self.add_special_tokens)


class DetokenizeBody(StrictShape):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


async def tokenize(request: Request) -> Response:
    """The ids of a text or a conversation."""
    await caller_of(request)
    body, gateway = await requests.read(request, TokenizeBody), gateway_of(request)
    check_model(gateway, body.model)
    given = [name for name in body.alone if getattr(body, name) is not None]
    if len(given) != 1:
        raise requests.FieldError(
            "prompt", "stands alone", seen=given, allowed="prompt, or messages"
        )
    reads = gateway.router.ready.max_sequence_tokens
    work = partial(body.ids, gateway, CONTEXTS * reads)
    ids = await gateway.aside.run(request.state.body_bytes, work)
    return JSONResponse({"count": len(ids), "max_model_len": reads, "tokens": ids})


async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens by their names."""
    await caller_of(request)
    body, gateway = await requests.read(request, DetokenizeBody), gateway_of(request)
    check_model(gateway, body.model)
    most = CONTEXTS * gateway.router.ready.max_sequence_tokens
    if len(body.tokens) > most:
        raise requests.FieldError("tokens", "are too many", seen=len(body.tokens), allowed=most)
    work = partial(gateway.codec.decode_all, body.tokens)
    text = await gateway.aside.run(request.state.body_bytes, work)
    return JSONResponse({"prompt": text})


COUNTED_CONTEXTS = 8
"""Longest counted conversation, as a multiple of the model's context."""


async def count_tokens(request: Request) -> Response:
    """Count tokens under the chat template; generates nothing and opens no session."""
    await caller_of(request)
    body, gateway = await requests.read(request, ConversationBody), gateway_of(request)
    check_model(gateway, body.model)
    counted = COUNTED_CONTEXTS * gateway.router.ready.max_sequence_tokens
    count = partial(_tokens, body, gateway, counted)
    return JSONResponse({"input_tokens": await gateway.aside.run(request.state.body_bytes, count)})


def _tokens(body: ConversationBody, gateway: Gateway, most: int) -> int:
    asked = body.request()
    if asked.tool_choice.mode == "none":
        asked = replace(asked, tools=())
    told = gateway.planner.prompts.encode(asked, most)
    return len(told) + len(gateway.codec.encode_piece(asked.prefill, most))
