"""What is seen of every HTTP request: a span below the caller's, counts and seconds by route.

Owns no answer.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.telemetry import extract, meter, span

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Observed:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        made_by = meter()
        self._count = made_by.create_counter("paceline.gateway.http.requests", unit="{request}")
        self._seconds = made_by.create_histogram(
            "paceline.gateway.http.duration", unit="s", explicit_bucket_boundaries_advisory=SECONDS
        )
        self._open = made_by.create_up_down_counter("paceline.gateway.http.open", unit="{request}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # the client went away before there was one

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.perf_counter()
        carrier = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        self._open.add(1)
        try:
            with span(
                "http.request", kind="server", parent=extract(carrier), method=scope["method"]
            ) as current:
                try:
                    await self._app(scope, receive, watched)
                finally:
                    current.set_attribute("http.route", _route(scope))
                    current.set_attribute("http.response.status_code", status)
        finally:
            self._open.add(-1)
            about = {"route": _route(scope), "status": str(status)}
            self._count.add(1, about)
            self._seconds.record(time.perf_counter() - started, about)


def _route(scope: Scope) -> str:
    """The route's pattern; paths that are none share a name, so that strangers cannot fill the
    metrics.
    """
    route = scope.get("route")
    return str(getattr(route, "path", "none"))
