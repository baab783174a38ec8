"""Routes of OpenAI's responses API.

Shows a stored response to its own caller only.
"""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_gateway.api.http import bodies
from rollout_gateway.api.http.keys import caller_of
from rollout_gateway.api.http.responses.answers import ResponsesAnswers
from rollout_gateway.api.http.responses.schema import ResponsesBody
from rollout_gateway.api.http.responses.store import PastResponses
from rollout_gateway.api.http.streaming import PlanRunner
from rollout_gateway.chat.messages import Message
from rollout_gateway.gateway import Gateway


class ResponsesApi:
    """The routes of responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running = PlanRunner(gateway)
        self._past = PastResponses()

    def routes(self) -> list[Route]:
        """Path by path."""
        one = "/v1/responses/{id}"
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route(one, self.show),
            Route(one, self.delete, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        """Generate; the response is stored unless the client forbids it."""
        caller = await caller_of(self._gateway, request)
        body = await bodies.read(request, ResponsesBody)
        body.check()
        before: tuple[Message, ...] = ()
        if body.previous_response_id is not None:
            before = self._past.get(
                body.previous_response_id, caller, "previous_response_id"
            ).messages
        self._gateway.admit()
        name = f"resp_{uuid.uuid4().hex}"
        plans = self._gateway.planner.chat(
            caller, body.request(before), body.sampling, count=1, completion_id=name
        )

        def finished(response: dict[str, Any], said: Message) -> None:
            if body.store:
                self._past.put(response, (*before, *body.messages(), said), caller)

        answers = ResponsesAnswers(self._gateway.model, body, name, finished)
        return await self._running.answer(request, plans, answers, stream=body.stream)

    async def show(self, request: Request) -> Response:
        """A stored response."""
        caller = await caller_of(self._gateway, request)
        return JSONResponse(self._past.get(request.path_params["id"], caller).body)

    async def delete(self, request: Request) -> Response:
        """Forget a stored response."""
        caller = await caller_of(self._gateway, request)
        response_id = request.path_params["id"]
        self._past.drop(response_id, caller)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
