"""Shows and forgets stored responses, to their own caller only."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_gateway.api.http.keys import caller_of
from rollout_gateway.api.http.responses.store import past_responses


async def show(request: Request) -> Response:
    """A stored response."""
    caller = await caller_of(request)
    return JSONResponse(past_responses(request).get(request.path_params["id"], caller).body)


async def delete(request: Request) -> Response:
    """Forget a stored response."""
    caller = await caller_of(request)
    response_id = request.path_params["id"]
    past_responses(request).drop(response_id, caller)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})
