"""The gateway as a process: gRPC and HTTP on one event loop. Owns the order of start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import uvicorn

from paceline.errors import ConfigError
from paceline.local.patience import patient
from paceline.local.processes import open_many_files
from paceline.local.tokens import example_call
from paceline.rpc import EPOCHS, EpochGuard, Server, is_loopback
from paceline.rpc.progress import add_progress
from paceline.services.rollout_gateway.api.grpc import RolloutServicer
from paceline.services.rollout_gateway.api.http.app import build_app
from paceline.services.rollout_gateway.api.http.bodies import most_bytes
from paceline.services.rollout_gateway.api.http.protocol import BoundedProtocol
from paceline.services.rollout_gateway.api.sglang_router import RouterEntry
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.progress import progress
from paceline.telemetry import get_logger
from paceline.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from paceline.weights import SERVICE_NAME, WeightServicer, add_weight_service

ROLLOUT_SERVICE = "paceline.v1.RolloutService"
STOP_GRACE_S = 2.0
START_DEADLINE_S = 10.0
BACKLOG = 65_535
"""Connections that wait to be taken; the system has a bound of its own (net.core.somaxconn). One
that finds no place is tried again by the client's system after a second, then two, then four.
"""
COLLECT_AFTER = 10_000
"""New objects after which Python looks for cycles. By its own 700 it went through all that 10,000
sessions hold so often that it took a quarter of the CPU time, a second at a time.
"""
log = get_logger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers (the process has its own) and with an event for its
    start.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set and close everything.

    Raises ConfigError for settings that cannot work.
    """
    open_many_files()
    async with running(config) as (_, port):
        sys.stdout.write(f"{example_call(config, port)}\n")
        sys.stdout.flush()
        await stop.wait()


@contextlib.asynccontextmanager
async def running(config: GatewayConfig) -> AsyncIterator[tuple[int, int]]:
    """A gateway inside the block; gives its gRPC and HTTP ports."""
    gateway = Gateway(config)
    guard = EpochGuard(config.security, config.spool and config.spool / EPOCHS)
    server = Server(config.addresses.gateway, config.security)
    server.add(
        add_RolloutServiceServicer_to_server, RolloutServicer(gateway, guard), ROLLOUT_SERVICE
    )
    weights = WeightServicer(
        gateway.spool,
        guard,
        gateway.weights,
        max_bytes=config.run.max_version_bytes,
        handover=config.run.handover_dir("gateway") if config.spool else None,
    )
    server.add(add_weight_service, weights, SERVICE_NAME)
    add_progress(server, lambda: progress(gateway))
    await gateway.start()
    longest = gateway.router.ready.max_sequence_tokens
    server.caps[f"/{ROLLOUT_SERVICE}/Generate"] = most_bytes(longest)
    try:
        http, http_task, http_port = await _start_http(gateway)
        try:
            port = await server.start()
            gateway.expiry.start()
            with _collected_seldom():
                log.info("gateway serves", model=gateway.model, grpc_port=port, http_port=http_port)
                async with _listed(gateway, http_port):
                    yield port, http_port
        finally:
            gateway.agents.offers.stop()
            await gateway.expiry.stop()
            gateway.router.traffic.stop()
            http.should_exit = True
            await asyncio.gather(server.stop(STOP_GRACE_S), http_task)
    finally:
        await gateway.stop()


@contextlib.asynccontextmanager
async def _listed(gateway: Gateway, http_port: int) -> AsyncIterator[None]:
    """In the list of an SGLang router inside the block, where there is one."""
    if not gateway.config.engine.sglang.router:
        yield
        return
    entry = RouterEntry(gateway.config, gateway.model, http_port)
    entry.start()
    try:
        yield
    finally:
        await entry.stop()


@contextlib.contextmanager
def _collected_seldom() -> Iterator[None]:
    """What lives as long as the process need not be looked through while streams wait, and what
    lives as long as a session not so often.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def _start_http(gateway: Gateway) -> tuple[HttpServer, asyncio.Task[None], int]:
    address = gateway.config.addresses.http
    _check_reachable(gateway.config)
    config = _http_config(gateway)
    server = HttpServer(config)
    try:
        sockets = [config.bind_socket()]
    except SystemExit as error:
        raise ConfigError(
            "cannot listen there: the port is in use or not ours",
            seen=address,
            allowed="a free port",
        ) from error

    task = asyncio.create_task(server.serve(sockets=sockets))
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait(
        (task, listening), timeout=patient(START_DEADLINE_S), return_when=asyncio.FIRST_COMPLETED
    )
    if not server.listening.is_set():
        cause = task.exception() if task.done() else None
        await cancel(task, listening)
        raise ConfigError("the HTTP server did not start", seen=address) from cause
    return server, task, int(sockets[0].getsockname()[1])


def _check_reachable(config: GatewayConfig) -> None:
    """Raises ConfigError where others could use the HTTP API unseen."""
    address, security = config.addresses.http, config.security
    closed = security.token and security.tls_cert
    if not (is_loopback(address) or security.allow_insecure or closed):
        raise ConfigError(
            "the HTTP address is reachable from other machines without token and TLS",
            seen=address,
            allowed="a loopback address, or token and TLS, or security.allow_insecure=true",
        )


def _http_config(gateway: Gateway) -> uvicorn.Config:
    address, security = gateway.config.addresses.http, gateway.config.security
    host, _, port = address.rpartition(":")
    return uvicorn.Config(
        build_app(gateway, loopback=is_loopback(address)),
        host=host.strip("[]"),
        port=int(port),
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedProtocol,
        backlog=BACKLOG,
        timeout_keep_alive=gateway.config.api.keep_alive_s,
        timeout_graceful_shutdown=int(STOP_GRACE_S),
        ssl_certfile=security.tls_cert or None,
        ssl_keyfile=security.tls_key or None,
    )
