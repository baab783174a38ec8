"""The standard health service. Owns the serving flags of one server, not what makes them true.

Unlike grpcio's own its flags are set without awaiting, and watchers end when the server stops
instead of holding it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

OVERALL = ""


class Health(HealthServicer):  # type: ignore[misc]
    """Serving flags by full service name; the empty name serves while every service does."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, name: str, serving: bool) -> None:
        """Set one flag and wake the watchers."""
        self._serving[name] = serving
        self._wake()

    def known(self, name: str) -> bool:
        """Whether a flag was ever set for that name."""
        return name in self._serving

    def close(self) -> None:
        """Nothing serves any more; watchers are told and end."""
        self._serving = dict.fromkeys(self._serving, False)
        self._closed = True
        self._wake()

    async def Check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        """One look; NOT_FOUND for a name this server does not have."""
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: HealthCheckRequest, context: Any) -> None:
        """The status now and at each change, until the server stops."""
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                await context.write(HealthCheckResponse(status=status))
                last = status
            if self._closed:
                return
            await changed.wait()

    def _status(self, name: str) -> Any:
        if name == OVERALL:
            serving = bool(self._serving) and all(self._serving.values())
        elif name in self._serving:
            serving = self._serving[name]
        else:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
