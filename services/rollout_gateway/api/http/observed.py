"""Observes every HTTP request: a span below the caller's span, counts and seconds by route."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.services.rollout_gateway import metrics
from paceline.telemetry import extract, names, span


class Observed:
    """An ASGI application around another application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # the client disconnected before an answer

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.perf_counter()
        carrier = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        metrics.HTTP_OPEN.record(1)
        try:
            about = {names.HTTP_METHOD: scope["method"]}
            with span(names.HTTP_REQUEST, about, kind="server", parent=extract(carrier)) as current:
                try:
                    await self._app(scope, receive, watched)
                finally:
                    current.set_attribute(names.HTTP_ROUTE, _route(scope))
                    current.set_attribute(names.HTTP_STATUS, status)
        finally:
            metrics.HTTP_OPEN.record(-1)
            labels = {"route": _route(scope), "status": str(status)}
            metrics.HTTP_REQUESTS.record(**labels)
            metrics.HTTP_DURATION.record(time.perf_counter() - started, **labels)


def _route(scope: Scope) -> str:
    """The route's pattern. Unknown paths share one name, so that strangers cannot flood the
    metrics.
    """
    route = scope.get("route")
    return str(getattr(route, "path", "none"))
