"""An HTTP server on the event loop of a service, whose process has its own signal handlers."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from paceline.addresses import is_loopback
from paceline.config import SecurityConfig
from paceline.errors import ConfigError
from paceline.local import ports

BACKLOG = 65_535
"""Connections that wait to be accepted; the system has its own limit (net.core.somaxconn). The
client's system retries a refused connection after one second, then two, then four.
"""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, because the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def start_http(
    app: ASGIApp, address: str, security: SecurityConfig, **options: Any
) -> tuple[HttpServer, asyncio.Task[None], int]:
    """Start an HTTP server; returns the server, its task and its port, which accepts connections.

    `options`: further settings of uvicorn. Raises ConfigError when it cannot listen, when files of
    TLS cannot be read, or when other machines could use it without authentication.
    """
    closed = security.token and security.tls_cert
    if not (is_loopback(address) or security.allow_insecure or closed):
        message = "the HTTP address is reachable from other machines without token and TLS"
        allowed = "a loopback address, or token and TLS, or security.allow_insecure=true"
        raise ConfigError(message, seen=address, allowed=allowed)
    host, _, port = address.rpartition(":")
    settings = uvicorn.Config(
        app,
        host=host.strip("[]"),
        port=int(port),
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        ssl_certfile=security.tls_cert or None,
        ssl_keyfile=security.tls_key or None,
        **options,
    )
    try:
        settings.load()
        listening = ports.bound(settings.host, settings.port)
        listening.listen(BACKLOG)
    except OSError as error:
        message = f"HTTP cannot be served: {error.strerror or error}"
        allowed = "a free port, and readable files of TLS"
        raise ConfigError(message, seen=address, allowed=allowed) from error
    server = HttpServer(settings)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    return server, task, int(listening.getsockname()[1])
