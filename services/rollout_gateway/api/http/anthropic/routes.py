"""Routes of Anthropic's messages API."""

from __future__ import annotations

import uuid
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_gateway.api.http import bodies
from rollout_gateway.api.http.anthropic.answers import AnthropicAnswers
from rollout_gateway.api.http.anthropic.schema import ConversationBody, MessagesBody
from rollout_gateway.api.http.keys import caller_of
from rollout_gateway.api.http.streaming import PlanRunner
from rollout_gateway.gateway import Gateway


class AnthropicApi:
    """The routes of messages."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running = PlanRunner(gateway)

    def routes(self) -> list[Route]:
        """Path by path."""
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Generate a message."""
        caller = await caller_of(self._gateway, request)
        body = await bodies.read(request, MessagesBody)
        asked = body.request()
        self._gateway.admit()
        name = f"msg_{uuid.uuid4().hex}"
        plans = self._gateway.planner.chat(
            caller, asked, body.sampling, count=1, completion_id=name
        )
        answers = AnthropicAnswers(self._gateway.model, name, len(plans[0].prompt))
        answer = await self._running.answer(request, plans, answers, stream=body.stream)
        answer.headers["request-id"] = name
        return answer

    async def count_tokens(self, request: Request) -> Response:
        """Tokens of a conversation under the chat template; nothing is generated and no session
        begins.
        """
        await caller_of(self._gateway, request)
        asked = (await bodies.read(request, ConversationBody)).request()
        if asked.tool_choice.mode == "none":
            asked = replace(asked, tools=())
        codec = self._gateway.codec
        return JSONResponse(
            {"input_tokens": len(codec.encode_chat(asked)) + len(codec.encode_piece(asked.prefill))}
        )
