"""Tokenizes, detokenizes and counts tokens without generation, in the formats of vLLM and
Anthropic.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.services.rollout_gateway.api.http import beyond, openai_schema, requests, shapes
from paceline.services.rollout_gateway.api.http.anthropic import ConversationBody
from paceline.services.rollout_gateway.chat.messages import ChatRequest
from paceline.services.rollout_gateway.gateway import Gateway

CONTEXTS = 8
"""Longest text, conversation or list of ids, as a multiple of the model's context."""
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class TokenizeBody(shapes.Shape):
    """POST /tokenize: a text, or a conversation under the chat template."""

    undeclared = beyond.TOKENS
    model: str | None = None
    prompt: str | None = None
    messages: shapes.Several[openai_schema.ChatMessage] | None = Field(
        None, max_length=shapes.MAX_MESSAGES
    )
    tools: shapes.Several[openai_schema.ToolBody] | None = Field(None, max_length=shapes.MAX_TOOLS)
    add_special_tokens: bool = True

    def ids(self, gateway: Gateway, longest: int) -> tuple[int, ...]:
        """The ids of the text or conversation. Raises InvalidInput above `longest` ids."""
        if self.messages is not None:
            messages = tuple(one.message() for one in self.messages)
            tools = tuple(one.function.shown() for one in self.tools or ())
            return gateway.planner.prompts.encode(ChatRequest(messages, tools), longest)
        return gateway.codec.encode(self.prompt or "", longest, special=self.add_special_tokens)


class DetokenizeBody(shapes.Shape):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


async def tokenize(request: Request) -> Response:
    """The ids of a text or a conversation."""
    body, gateway, context = await _read(request, TokenizeBody)
    given = [name for name in ("prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise beyond.FieldError("prompt", "stands alone", seen=given, allowed="prompt, or messages")
    work = partial(body.ids, gateway, CONTEXTS * context)
    ids = await gateway.aside.run(request.state.body_bytes, work)
    return JSONResponse({"count": len(ids), "max_model_len": context, "tokens": ids})


async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens by their names."""
    body, gateway, context = await _read(request, DetokenizeBody)
    if len(body.tokens) > CONTEXTS * context:
        seen, allowed = len(body.tokens), CONTEXTS * context
        raise beyond.FieldError("tokens", "are too many", seen=seen, allowed=allowed)
    work = partial(gateway.codec.decode_all, body.tokens)
    text = await gateway.aside.run(request.state.body_bytes, work)
    return JSONResponse({"prompt": text})


async def count_tokens(request: Request) -> Response:
    """Count tokens under the chat template; generates nothing and opens no session."""
    body, gateway, context = await _read(request, ConversationBody)

    def count() -> int:
        asked = body.request()
        if asked.tool_choice.mode == "none":
            asked = replace(asked, tools=())
        ids = gateway.planner.prompts.encode(asked, CONTEXTS * context)
        return len(ids) + len(gateway.codec.encode_piece(asked.prefill, CONTEXTS * context))

    return JSONResponse({"input_tokens": await gateway.aside.run(request.state.body_bytes, count)})


async def _read(request: Request, kind: type[requests.B]) -> tuple[requests.B, Gateway, int]:
    """(body, gateway, tokens of the model's context). Raises the errors of a wrong key, body or
    model.
    """
    await requests.caller_of(request)
    body, gateway = await requests.read(request, kind), requests.gateway_of(request)
    requests.check_model(gateway, getattr(body, "model", None))
    return body, gateway, gateway.router.ready.max_sequence_tokens
