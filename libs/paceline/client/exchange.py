"""Configures httpx, sends one request with a deadline, and interprets its errors.

The differences between asyncio and blocking calls are here, side by side. A deadline of asyncio
cancels; a blocking call needs a time-out for every phase, and a timer.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from socket import SHUT_RDWR, socket
from threading import Timer
from typing import Any

import httpx

from paceline.addresses import proxied
from paceline.client.flows import Lost, Send
from paceline.client.settings import KEEPALIVE_S, MAX_CONNECTIONS, ClientSettings
from paceline.errors import DataLoss, DeadlineExceeded, PacelineError, Unavailable

MAX_ANSWER_BYTES = 256 << 20
_NOT_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)


def http_options(settings: ClientSettings, verify: bool | ssl.SSLContext) -> dict[str, Any]:
    """Arguments of httpx.Client and httpx.AsyncClient.

    Redirects are not followed, since they would pass the key to another server.
    """
    limits = httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S)
    return {
        "base_url": settings.base_url,
        "limits": limits,
        "timeout": None,
        **direct(settings.base_url, verify),
    }


def direct(url: str, verify: bool | ssl.SSLContext = True) -> dict[str, Any]:
    """Arguments of httpx's clients for reaching a URL of this machine without a proxy.

    httpx reads the variables for proxies and for trusted certificates, or neither.
    """
    if proxied(url):
        return {"verify": verify}
    if verify is True and url.startswith("https:"):
        verify = httpx.create_ssl_context()
    return {"verify": verify, "trust_env": False}


def lost_by(error: httpx.RequestError, *, late: bool) -> Lost:
    """The meaning of an httpx error for the call."""
    late = late or isinstance(error, httpx.TimeoutException)
    return Lost(
        sent=not isinstance(error, _NOT_SENT), late=late, cause=error, hopeless=_untrusted(error)
    )


def within_bounds(size: int) -> int:
    """Raises DataLoss when an answer exceeds the limit in memory."""
    if size > MAX_ANSWER_BYTES:
        raise DataLoss(
            "the answer is too long",
            seen=f"over {MAX_ANSWER_BYTES} bytes",
            allowed=MAX_ANSWER_BYTES,
        )
    return size


def broken_off(cause: Exception | None, *, late: bool) -> PacelineError:
    """The error of a stream that broke off."""
    error: PacelineError
    if late:
        error = DeadlineExceeded("the deadline passed while the answer was streamed")
    else:
        error = Unavailable(
            "the stream broke off before its end", reason="STREAM_BROKEN", seen=cause or "its end"
        )
    error.__cause__ = cause
    return error


def async_until(end: float) -> asyncio.Timeout:
    """Wraps awaiting code: raises TimeoutError at `end`."""
    return asyncio.timeout(end - time.monotonic())


def until(end: float) -> AbstractContextManager[None]:
    """Wraps blocking code, which `exchange` has already bounded."""
    return nullcontext()


def async_exchange(
    http: httpx.AsyncClient, send: Send, end: float
) -> AbstractAsyncContextManager[httpx.Response]:
    """A response with its head received, bounded by `async_until`."""
    return http.stream(send.method, send.path, headers=dict(send.headers), content=send.content)


@contextmanager
def exchange(http: httpx.Client, send: Send, end: float) -> Iterator[httpx.Response]:
    """A response with its head received; its body ends by `end`."""
    headers, extensions = dict(send.headers), {"timeout": TimeLeft(end)}
    with (
        http.stream(
            send.method, send.path, headers=headers, content=send.content, extensions=extensions
        ) as response,
        cut_off(response, end),
    ):
        yield response


class TimeLeft(dict[str, float]):
    """httpx's time-outs, computed on access: each phase of an exchange gets the time left by the
    earlier phases.
    """

    def __init__(self, end: float) -> None:
        super().__init__()
        self._end = end

    def get(self, key: str, default: Any = None) -> Any:
        """Seconds until the end, for every phase."""
        return max(self._end - time.monotonic(), 0.001)


@contextmanager
def cut_off(response: httpx.Response, end: float) -> Iterator[None]:
    """Closes the connection at `end`, so a slow or stalled body cannot exceed the deadline.

    httpx bounds each read of a body, not their sum. A truncated body may look complete, so check
    the clock afterwards.
    """
    connection = response.extensions["network_stream"].get_extra_info("socket")
    timer = Timer(max(end - time.monotonic(), 0.0), _shut_down, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut_down(connection: socket) -> None:
    try:
        # the socket below TLS, since its reader is in the middle of a read
        socket.shutdown(connection, SHUT_RDWR)
    except OSError:
        return  # already closed, without a reader


def _untrusted(error: BaseException | None) -> bool:
    """True when the peer's certificate is not trusted; no further attempt changes that."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
