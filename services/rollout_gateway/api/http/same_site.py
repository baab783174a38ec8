"""Refuses what the page of another site makes a browser send.

On loopback whoever reaches the gateway is trusted, and a page that its user has open reaches it
too: under a name of its own that resolves to loopback (DNS rebinding; the Host is foreign), or by a
request that needs no preflight (the Origin is foreign, or the body is no JSON: see bodies.py).
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
    """An ASGI application around another; `loopback`: nobody beyond this machine is served.
    `origins`: whose pages may ask; "*" is anybody's.
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
    """Raises InvalidInput (NOT_ALLOWED) for a foreign Host on loopback or a foreign Origin that is
    not among the given ones.
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
