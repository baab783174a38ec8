"""Keeps past responses in memory, so that a request can continue a response by its id."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.errors import NotFound
from paceline.services.rollout_gateway.api.http.keys import caller_of
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.sessions.names import GatewayNames
from paceline.services.rollout_gateway.sessions.session import Caller

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20
"""Maximum bytes of all stored responses; a conversation counts with each response that ends it."""

OVERHEAD_BYTES = 100
"""Approximate bytes of a message or a call besides its texts."""


class UnknownResponse(NotFound):
    """No response of that id is stored, or the caller may not read it."""

    def __init__(self, response_id: str, field: str | None = None) -> None:
        super().__init__("no such response", reason="RESPONSE_NOT_FOUND", seen=response_id[:100])
        self.field = field


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and the conversation that ends with it."""

    body: dict[str, Any]
    # without instructions: a later request sends its own instructions
    messages: tuple[Message, ...]
    owner: str  # id of the session whose key requested it; empty: no session
    size: int  # approximate bytes


class PastResponses:
    """The newest responses. The key of a session finds that session's responses only."""

    def __init__(
        self,
        names: GatewayNames | None = None,
        *,
        most: int = MAX_RESPONSES,
        most_bytes: int = MAX_BYTES,
    ) -> None:
        self._names = names or GatewayNames()
        self._most = most
        self._most_bytes = most_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, body: dict[str, Any], messages: tuple[Message, ...], caller: Caller) -> None:
        """Store a response; the oldest responses make room."""
        size = len(json.dumps(body)) + sum(map(_size, messages))
        entry = Stored(body, messages, caller.queue_key, size)
        self._stored[str(body["id"])] = entry
        self._bytes += entry.size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, response_id: str, caller: Caller, field: str | None = None) -> Stored:
        """A response by its id; an error shows `field`. Raises UnknownResponse, FailedPrecondition
        for a response of another gateway.
        """
        found = self._stored.get(response_id)
        if found is None:
            self._names.require_own(response_id)
        if found is None or (caller.session is not None and caller.queue_key != found.owner):
            raise UnknownResponse(response_id, field)
        return found

    def drop(self, response_id: str, caller: Caller) -> None:
        """Delete a response. Raises UnknownResponse."""
        self._bytes -= self.get(response_id, caller).size
        del self._stored[response_id]


def past_responses(request: Request) -> PastResponses:
    """The stored responses of the application."""
    past: PastResponses = request.app.state.past_responses
    return past


async def show(request: Request) -> Response:
    """A stored response."""
    caller = await caller_of(request)
    return JSONResponse(past_responses(request).get(request.path_params["id"], caller).body)


async def delete(request: Request) -> Response:
    """Delete a stored response."""
    caller = await caller_of(request)
    response_id = request.path_params["id"]
    past_responses(request).drop(response_id, caller)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _size(message: Message) -> int:
    calls = sum(
        len(call.name) + len(call.arguments) + OVERHEAD_BYTES for call in message.tool_calls
    )
    return len(message.content) + len(message.reasoning) + calls + OVERHEAD_BYTES
