"""Channels to other services, and waiting for their readiness. A channel adds retry, keepalive,
trace and token to each call.

Calls are wrapped in the channel itself. grpc.aio's client interceptors put a queue between the
caller's `write` and the wire, which would cost a weight push its backpressure and its speed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from functools import cache, partial
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from paceline.addresses import proxied
from paceline.config import SecurityConfig
from paceline.errors import Unavailable
from paceline.rpc import server, status
from paceline.rpc.security import AUTHORIZATION, channel_credentials, check_security
from paceline.telemetry import inject, mark_failed, names, tracer
from paceline.v1 import coordinator_pb2, drafter_pb2, policy_pb2, rollout_pb2, weights_pb2

_RETRY = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def channel(address: str, security: SecurityConfig) -> grpc.aio.Channel:
    """A channel to `host:port`; create it on the running event loop.

    Calls carry the current trace and the token and have a client span. Unary calls to Paceline's
    services that end in UNAVAILABLE are retried up to 3 times. Raises ConfigError in the same cases
    as `Server` for that address.
    """
    check_security(address, security)
    credentials = channel_credentials(security)
    options = _options(address)
    if credentials is None:
        inner = grpc.aio.insecure_channel(address, options=options)
    else:
        inner = grpc.aio.secure_channel(address, credentials, options=options)
    return _TracedChannel(inner, address, security.token)


async def wait_ready(to: grpc.aio.Channel, deadline_s: float) -> None:
    """Waits until the channel is connected. Raises Unavailable after the deadline."""
    try:
        async with asyncio.timeout(deadline_s):
            await to.channel_ready()
    except TimeoutError as error:
        address = getattr(to, "address", "the peer")
        message = f"no connection to {address} in time"
        raise Unavailable(message, allowed=f"{deadline_s} s") from error


async def wait_healthy(address: str, security: SecurityConfig, deadline_s: float) -> None:
    """Waits until all services of that server are serving. Raises Unavailable after the
    deadline.
    """
    seen = "no answer"
    peer = channel(address, security)
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                # gRPC waits for the connection; the loop repeats only if a server stopped in
                # between.
                watch = HealthStub(peer).Watch(HealthCheckRequest(), wait_for_ready=True)
                try:
                    async for response in watch:
                        seen = HealthCheckResponse.ServingStatus.Name(response.status)
                        if response.status == HealthCheckResponse.SERVING:
                            watch.cancel()
                            return
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise status.error_from_rpc(error) from error
                await peer.wait_for_state_change(grpc.ChannelConnectivity.READY)
    except TimeoutError as error:
        message = f"{address} was not healthy in {deadline_s} s"
        raise Unavailable(message, seen=seen, allowed="SERVING") from error
    finally:
        await peer.close()


async def responses(call: Any) -> AsyncGenerator[Any]:
    """Messages of a streaming call. Closing the generator ends the call.

    In plain grpc.aio, a call continues if its reader is cancelled between its start and its first
    message.
    """
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()


def _options(address: str) -> list[tuple[str, Any]]:
    return [
        ("grpc.enable_http_proxy", int(proxied(address))),
        ("grpc.max_receive_message_length", server.MESSAGE_CAP),
        ("grpc.keepalive_time_ms", 15_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted peer is found again within seconds. The minimum also bounds one attempt: two
        # lost packets are resent within three seconds, and a busy machine is as slow.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.service_config", _service_config()),
    ]


@cache
def _service_config() -> str:
    """Retries unary methods only: a stream may have done half of its work."""
    modules = (coordinator_pb2, drafter_pb2, policy_pb2, rollout_pb2, weights_pb2)
    names = [
        {"service": service.full_name, "method": method.name}
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    ]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": _RETRY}]})


class _TracedChannel:
    """A channel that adds trace and token to its calls."""

    def __init__(self, inner: grpc.aio.Channel, address: str, token: str) -> None:
        self.address = address
        self._inner = inner
        self._authorization = ((AUTHORIZATION, f"Bearer {token}"),) if token else ()
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _TracedChannel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)
        if self._ending:
            await asyncio.wait(tuple(self._ending), timeout=1)

    def __getattr__(self, name: str) -> Any:
        """A function of the inner channel; a function that makes calls is wrapped."""
        found = getattr(self._inner, name)
        return partial(self._call_of, found) if name in _KINDS else found

    def _call_of(self, make: Callable[..., Any], method: str, *args: Any, **kwargs: Any) -> Any:
        return self._traced(method, make(method, *args, **kwargs))

    def _traced(self, method: str, start: Callable[..., Any]) -> Callable[..., Any]:
        if method.startswith("/grpc."):
            return self._plain(start)
        service, _, name = method.lstrip("/").partition("/")
        title = names.rpc_span(service, name)
        facts = {
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: service,
            names.RPC_METHOD: name,
            names.SERVER_ADDRESS: self.address,
        }

        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            opened = tracer().start_span(title, kind=SpanKind.CLIENT, attributes=facts)
            carrier = inject(set_span_in_context(opened))
            try:
                started = start(
                    *args,
                    metadata=(*(metadata or ()), *carrier.items(), *self._authorization),
                    **kwargs,
                )
            except BaseException as error:
                mark_failed(opened, error)
                opened.end()
                raise
            started.add_done_callback(lambda done: self._ended(opened, done))
            return started

        return call

    def _plain(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return start(*args, metadata=(*(metadata or ()), *self._authorization), **kwargs)

        return call

    def _ended(self, opened: Span, call: Any) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # The loop is closed and the call with it, so its code cannot be read.
            opened.end()
            return
        task = loop.create_task(_end_span(opened, call, time.time_ns()))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _end_span(opened: Span, call: Any, end_ns: int) -> None:
    code = await call.code()
    opened.set_attribute(names.RPC_STATUS, code.value[0])
    if code is not grpc.StatusCode.OK:
        opened.set_status(StatusCode.ERROR, await call.details())
    opened.end(end_ns)
