"""Adds headers to an answer that report ignored and overridden parts of the request.

Handlers note these parts in the request's state. Any answer gets the headers, errors too.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.services.rollout_gateway.api.http.beyond import IGNORED_HEADER

OVERRIDDEN_HEADER = "x-paceline-overridden"
TOLD = {IGNORED_HEADER: "ignored", OVERRIDDEN_HEADER: "overridden"}
"""Header -> attribute of the request's state, a sequence of texts."""


class Told:
    """An ASGI application around another application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                state = scope.get("state", {})
                headers = MutableHeaders(scope=message)
                for name, noted in TOLD.items():
                    if texts := state.get(noted):
                        headers[name] = ", ".join(texts)
            await send(message)

        await self._app(scope, receive, telling)
