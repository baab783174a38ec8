"""Makes the ASGI application with its routes and error handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from paceline import telemetry
from paceline.errors import InternalError, NotFound, PacelineError
from paceline.services.rollout_gateway.api.http import errors, openapi, operators
from paceline.services.rollout_gateway.api.http.observed import Observed
from paceline.services.rollout_gateway.api.http.responses.store import PastResponses
from paceline.services.rollout_gateway.api.http.routes import OPERATIONS
from paceline.services.rollout_gateway.api.http.same_site import SameSite
from paceline.services.rollout_gateway.api.http.told import TOLD, Told
from paceline.services.rollout_gateway.gateway import Gateway

log = telemetry.get_logger(__name__)


def build_app(gateway: Gateway, *, loopback: bool = True) -> Observed:
    """The ASGI application. `loopback`: it listens on a loopback address."""
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        PacelineError: _on_error,
        HTTPException: _on_http,
        Exception: _on_defect,
    }
    app = Starlette(routes=routes(), exception_handlers=handlers)
    app.state.gateway, app.state.past_responses = gateway, PastResponses(gateway.names)
    origins = gateway.config.api.cors_origins
    sited: ASGIApp = SameSite(Told(app), loopback=loopback, origins=origins)
    return Observed(_for_browsers(sited, origins) if origins else sited)


def _for_browsers(app: ASGIApp, origins: Sequence[str]) -> CORSMiddleware:
    """Answers preflight requests of pages from these origins, and lets the pages read the
    answers.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", *TOLD],
    )


def routes() -> list[Route]:
    """Every path and its handler."""
    return [
        Route("/metrics", operators.metrics),
        Route("/openapi.json", openapi.show),
        *(Route(one.path, one.handler, methods=[one.method]) for one in OPERATIONS),
    ]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return errors.answer(error, request)


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer a path or a method that is not served."""
    assert isinstance(error, HTTPException)
    kinds = {404: "no such path", 405: "the path does not take this method"}
    text = kinds.get(error.status_code, error.detail)
    problem = NotFound(text, seen=f"{request.method} {request.url.path}"[:200])
    answer = errors.answer(problem, request)
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer


async def _on_defect(request: Request, error: Exception) -> Response:
    """Answer an internal fault: its traceback is logged, not sent."""
    log.error("a request failed", path=request.url.path, exc_info=error)
    return errors.answer(InternalError("the gateway failed; its log says why"), request)
