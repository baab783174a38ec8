"""Refuses requests that the page of another site makes a browser send.

On loopback the gateway trusts every client, and a page in its user's browser can reach it too. Such
a page may use its own name that resolves to loopback (DNS rebinding): its Host is foreign. Or it
sends a request without a preflight: its Origin is foreign, or its body is no JSON (see bodies.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.errors import InvalidInput
from paceline.rpc import names_loopback
from paceline.services.rollout_gateway.api.http import errors


class SameSite:
    """An ASGI application around another application. `loopback`: the server only listens on this
    machine. `origins`: sites with access; "*" allows all sites.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._loopback = loopback
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                check_site(request.headers, loopback=self._loopback, origins=self._origins)
            except InvalidInput as error:
                await errors.answer(error, request)(scope, receive, send)
                return

        await self._app(scope, receive, send)


def check_site(headers: Headers, *, loopback: bool, origins: Sequence[str] = ()) -> None:
    """Raises InvalidInput (NOT_ALLOWED) for a foreign Host on loopback, or a foreign Origin outside
    the given origins.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if loopback and not names_loopback(host):
        raise InvalidInput(
            "the Host header names another machine than this one",
            reason="NOT_ALLOWED",
            seen=host[:100],
            allowed="localhost or a loopback address",
        )
    if "*" in origins or origin in origins:
        return
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise InvalidInput(
            "the page of another site asked for this",
            reason="NOT_ALLOWED",
            seen=origin[:100],
            allowed=f"the origin {host}, or none",
        )
