"""The standard health service: the serving flags of one server. Their values are set from outside.

Unlike grpcio's own service, it sets flags without awaiting. Its watchers end when the server stops,
so they do not delay the stop.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

OVERALL = ""


class Health(HealthServicer):  # type: ignore[misc]
    """Serving flags by full service name. The empty name is serving while every service is."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, name: str, serving: bool) -> None:
        """Sets one flag and wakes the watchers."""
        self._serving[name] = serving
        self._wake()

    def known(self, name: str) -> bool:
        """Whether a flag was ever set for that name."""
        return name in self._serving

    def close(self) -> None:
        """Sets all flags to not serving; watchers receive that and end."""
        self._serving = dict.fromkeys(self._serving, False)
        self._closed = True
        self._wake()

    async def Check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        """The present status; NOT_FOUND for a name that this server lacks."""
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: HealthCheckRequest, context: Any) -> None:
        """The present status and each change, until the server stops."""
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
