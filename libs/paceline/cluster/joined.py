"""Joins an existing Ray cluster or starts one on this machine, with clear errors before any start.

Ray executes code from any client that reaches its ports. Paceline's own cluster therefore listens
on loopback and requires a token. An external cluster that other hosts can reach must require a
token and TLS.
"""

import asyncio
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.addresses import is_loopback
from paceline.errors import ConfigError, DeadlineExceeded, Unavailable
from paceline.local import checks, patience, ports, processes

AUTO = "auto"
NAMESPACE = "paceline"
"""Ray namespace of all runs' actors."""
_REACHED_S = 5.0
_JOIN_S, _LEAVE_S = 60.0, 20.0
_NO_ANSWER = "the Ray cluster does not answer"
_OBJECTS_BYTES = 80 << 20
"""Object store size; a run stores no objects."""
_TOKEN, _TOKEN_FILE, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"


@asynccontextmanager
async def joined(address: str | None, *, allow_insecure: bool = False) -> AsyncIterator[Any]:
    """Yields the connected module `ray` for the duration of the block.

    `address`: `host:port` of a cluster, or "auto" for the cluster of this node. None starts a
    cluster on loopback, which stops at the end of the block. `allow_insecure`: as in the settings
    of a run.

    Raises ConfigError if Ray is not installed, if the cluster runs another version, or if a cluster
    that other hosts can reach lacks a token or TLS. Raises Unavailable if no cluster responds,
    DeadlineExceeded if it responds too late.
    """
    checks.require_extra("ray", "--launcher ray")
    alone = address is None or is_loopback(address)
    if address not in (None, AUTO):
        await _reached(str(address))
    _use_token(address)
    if address is not None and not (allow_insecure or (address != AUTO and is_loopback(address))):
        _require_security(str(address))
    ray = _imported(alone=alone)
    async with _connected(ray, address):
        yield ray


def _use_token(address: str | None) -> None:
    """Gives Paceline's own cluster a token; for an external cluster uses a configured token."""
    if address is None:
        os.environ.setdefault(_TOKEN, secrets.token_hex(32))
    file = Path(os.environ.get(_TOKEN_FILE) or Path.home() / ".ray/auth_token")
    if os.environ.get(_TOKEN) or file.is_file():
        os.environ.setdefault(_MODE, "token")


def _require_security(address: str) -> None:
    """Raises ConfigError unless the cluster uses a token and TLS."""
    lacking = [] if os.environ.get(_MODE) == "token" else [f"a token ({_MODE}=token, ${_TOKEN})"]
    if os.environ.get("RAY_USE_TLS") != "1":
        lacking.append("TLS (RAY_USE_TLS=1 and its files)")
    if lacking:
        raise ConfigError(
            f"a Ray cluster that other hosts reach needs {' and '.join(lacking)} on every node",
            seen=address,
            allowed="these, or security.allow_insecure=true in a network of one's own",
        )


def _imported(*, alone: bool) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    import ray
    from ray._private import ray_constants, worker

    worker.print_to_stdstream = partial(_on_stderr, worker)
    logging.getLogger("ray").setLevel(logging.ERROR)  # faults are raised as errors
    # Listen on loopback. Ray's default does so on macOS and Windows only.
    ray_constants.ENABLE_RAY_CLUSTER = not alone
    return ray


def _on_stderr(worker: Any, batch: dict[str, Any], ignore_prefix: bool) -> None:
    """Prints Ray's process output on stderr: the command's stdout is JSON lines."""
    worker.print_worker_logs(batch, sys.stderr, ignore_prefix)


def _join(ray: Any, address: str | None) -> None:
    own: dict[str, Any] = {}
    if address is None:
        own = {
            "num_cpus": processes.usable_cores(),
            "include_dashboard": False,
            "object_store_memory": _OBJECTS_BYTES,
        }
    try:
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            **own,
        )
    except Exception as error:  # Ray also raises bare exceptions
        message = " ".join(f"{error} {error.__cause__ or ''}".split())
        if "AuthToken" in message:
            raise ConfigError(
                "the Ray cluster does not take this token",
                seen=address,
                allowed=f"the cluster's, in ${_TOKEN} or ~/.ray/auth_token",
            ) from error
        if "mismatch" in message.lower():
            raise ConfigError(
                "the cluster runs another version of Ray or Python", seen=message
            ) from error
        seen = f"{address or 'one of our own'}: {error}"
        allowed = "host:port of `ray start --head`, auto on a node of it, or no --address"
        raise Unavailable("no Ray cluster answers", seen=seen, allowed=allowed) from error


async def _reached(address: str) -> None:
    """Raises ConfigError for an invalid address, Unavailable if no server listens there."""
    if "://" in address:
        message = "Ray's client is not used: a run's processes talk to each other themselves"
        allowed = "host:port of the cluster, from a machine that is one of its nodes, or auto"
        raise ConfigError(message, seen=address, allowed=allowed)
    host, port = ports.split_address(address, "--address")
    try:
        async with asyncio.timeout(patience.patient(_REACHED_S)):
            _, writer = await asyncio.open_connection(host, port, family=socket.AF_UNSPEC)
    except (OSError, TimeoutError) as error:
        allowed = "host:port that `ray start --head` names, 6379 unless set"
        raise Unavailable("no Ray cluster answers", seen=address, allowed=allowed) from error
    writer.close()


@asynccontextmanager
async def _connected(ray: Any, address: str | None) -> AsyncIterator[None]:
    """Connects in a thread that lives until the end of the block.

    Ray's processes die with the thread that starts them. In the main thread, Ray would replace
    Paceline's signal handlers.

    Raises as _join, and DeadlineExceeded after _JOIN_S seconds; the thread then ends unattended.
    """
    loop, over = asyncio.get_running_loop(), threading.Event()
    there, left = loop.create_future(), loop.create_future()

    def settle(future: asyncio.Future[None], error: BaseException | None) -> None:
        if not future.done():  # otherwise the result is too late
            future.set_exception(error) if error else future.set_result(None)

    def stay() -> None:
        failure: BaseException | None = None
        try:
            _join(ray, address)
        except BaseException as error:  # noqa: BLE001 - raised again in the awaiting coroutine
            failure = error
        loop.call_soon_threadsafe(settle, there, failure)
        over.wait()
        ray.shutdown()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, left, None)

    threading.Thread(target=stay, daemon=True).start()
    try:
        await patience.within(_JOIN_S, asyncio.shield(there), _NO_ANSWER)
        yield
    finally:
        over.set()
        with suppress(DeadlineExceeded):
            await patience.within(_LEAVE_S, asyncio.shield(left), _NO_ANSWER)
