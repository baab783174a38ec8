"""Counts the tokens of a conversation in Anthropic's spelling."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_gateway.api.http import bodies
from rollout_gateway.api.http.anthropic.schema import ConversationBody
from rollout_gateway.api.http.keys import caller_of, gateway_of


async def count_tokens(request: Request) -> Response:
    """Tokens under the chat template; nothing is generated and no session begins."""
    await caller_of(request)
    asked = (await bodies.read(request, ConversationBody)).request()
    if asked.tool_choice.mode == "none":
        asked = replace(asked, tools=())
    codec = gateway_of(request).codec
    tokens = len(codec.encode_chat(asked)) + len(codec.encode_piece(asked.prefill))
    return JSONResponse({"input_tokens": tokens})
