"""The gRPC server of every service: its port, health and reflection.

Unlike grpcio's own service, it sets flags without awaiting. Its watchers end when the server stops,
so they do not delay the stop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from paceline.config import SecurityConfig
from paceline.errors import ConfigError
from paceline.rpc.security import check_security, server_credentials
from paceline.rpc.server_calls import GuardedCalls


class Health(HealthServicer):  # type: ignore[misc]
    """Serving flags by full service name. The empty name is serving while every service is."""

    def __init__(self) -> None:
        self.serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, name: str, serving: bool) -> None:
        """Sets one flag and wakes the watchers."""
        self.serving[name] = serving
        self._wake()

    def close(self) -> None:
        """Sets all flags to not serving; watchers receive that and end."""
        self.serving = dict.fromkeys(self.serving, False)
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
        if name and name not in self.serving:
            return HealthCheckResponse.SERVICE_UNKNOWN
        flags = [self.serving[name]] if name else self.serving.values()
        serving = bool(flags) and all(flags)
        return HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


MESSAGE_CAP = 8 << 20
MOST_TASK_BYTES = MESSAGE_CAP * 7 // 8
"""Maximum size of the task texts of one call, bytes; the rest is for ids, numbers and tags."""
UNARY_CAP_S = 60.0
_CONCURRENT_CALLS = 4096
_OPTIONS: list[tuple[str, int]] = [
    # The receiver holds the cap: a cap on sending ends a streaming call with an unexplained
    # INTERNAL.
    ("grpc.max_receive_message_length", MESSAGE_CAP),
    # A second server on the same port fails instead of sharing it silently.
    ("grpc.so_reuseport", 0),
    # Below the clients' keepalive interval; otherwise they are rejected with "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class Server:
    """Create it on the running event loop, `add` services, `start` it, and finally `stop` it.

    Raises ConfigError at once when the address may not be served with this security.
    """

    def __init__(
        self, address: str, security: SecurityConfig, *, unary_cap_s: float = UNARY_CAP_S
    ) -> None:
        check_security(address, security)
        self._address = address
        self._credentials = server_credentials(security)
        self._health = Health()
        self.caps: dict[str, int] = {}
        """Bytes of a request at most, by "/service/method"; MESSAGE_CAP where none is named."""
        self._server = grpc.aio.server(
            interceptors=[GuardedCalls(security, unary_cap_s, self.caps)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=_CONCURRENT_CALLS,
        )

    def add(
        self, add_fn: Callable[[Any, Any], None], servicer: Any, full_service_name: str
    ) -> None:
        """Adds a service by its generated `add_XServicer_to_server`, or any function called as
        (servicer, grpc server).
        """
        add_fn(servicer, self._server)
        self._health.serving.setdefault(full_service_name, True)

    async def start(self) -> int:
        """Listens and returns the port. A service without a set flag serves from now on.

        Raises ConfigError when the address cannot be bound.
        """
        add_HealthServicer_to_server(self._health, self._server)
        names = (*self._health.serving, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        port = self._bind()
        await self._server.start()
        return port

    def set_serving(self, name: str, serving: bool) -> None:
        """Sets whether a service accepts calls; the overall flag (empty name) follows from all
        flags.
        """
        self._health.set(name, serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running calls finish for `grace_s` seconds, then cancels them."""
        self._health.close()
        await self._server.stop(grace_s)

    def _bind(self) -> int:
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(self._address)
            else:
                port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            message = "cannot listen there: the port is in use or not ours"
            seen = self._address
            allowed = "host:port that is free; port 0 takes any"
            raise ConfigError(message, reason="ADDRESS", seen=seen, allowed=allowed) from error
        return int(port)
