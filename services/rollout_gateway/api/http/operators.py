"""Answers the requests of operators and clients about the gateway itself: health, metrics,
model.
"""

from __future__ import annotations

from importlib.metadata import version as distribution_version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import telemetry
from paceline.services.rollout_gateway.api.http.keys import caller_of, gateway_of, require_token
from paceline.services.rollout_gateway.api.http.model_names import check_model, model_names

SCRAPE_DEADLINE_S = 5.0
"""Maximum seconds of a worker's answer to a scrape; a later worker keeps its last values.
Prometheus itself waits 10 s by default.
"""


async def health(request: Request) -> Response:
    """200 while at least one worker serves."""
    gateway = gateway_of(request)
    ready = len(gateway.router.processes())
    body = {"status": "ok" if ready else "starting", "model": gateway.model, "workers": ready}
    return JSONResponse(body, status_code=200 if ready else 503)


async def models(request: Request) -> Response:
    """The served model, under each of its names."""
    await caller_of(request)
    names = model_names(gateway_of(request))
    return JSONResponse({"object": "list", "data": [_model(request, name) for name in names]})


async def model(request: Request) -> Response:
    """The model of that name."""
    await caller_of(request)
    name = str(request.path_params["name"])
    check_model(gateway_of(request), name)
    return JSONResponse(_model(request, name))


async def version(request: Request) -> Response:
    """The version of Paceline."""
    await caller_of(request)
    return JSONResponse({"version": distribution_version("paceline")})


async def metrics(request: Request) -> Response:
    """Every instrument of the process in Prometheus text format; polls the workers first."""
    await require_token(request)
    await gateway_of(request).router.healths(SCRAPE_DEADLINE_S)
    return Response(telemetry.prometheus_page(), media_type=telemetry.PROMETHEUS_TYPE)


def _model(request: Request, name: str) -> dict[str, Any]:
    gateway = gateway_of(request)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "paceline",
        "max_model_len": gateway.router.ready.max_sequence_tokens,
    }
