"""Counts the tokens of a conversation in Anthropic's format."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.services.rollout_gateway.api.http import bodies
from paceline.services.rollout_gateway.api.http.anthropic.schema import ConversationBody
from paceline.services.rollout_gateway.api.http.keys import caller_of, gateway_of
from paceline.services.rollout_gateway.api.http.model_names import check_model
from paceline.services.rollout_gateway.gateway import Gateway

COUNTED_CONTEXTS = 8
"""Longest counted conversation, as a multiple of the model's context."""


async def count_tokens(request: Request) -> Response:
    """Count tokens under the chat template; generates nothing and opens no session."""
    await caller_of(request)
    body, gateway = await bodies.read(request, ConversationBody), gateway_of(request)
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
