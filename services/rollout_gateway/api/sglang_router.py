"""Keeps the gateway in the worker list of an SGLang router (`sglang-router`), which then forwards
callers' requests.

The entry contains no key. The router would put that key before each caller's key, and every caller
would then have the rights of the gateway's token.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from paceline.addresses import direct
from paceline.errors import ConfigError
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.telemetry import get_logger

CALL_S = 5.0
"""Maximum seconds of one call."""
LOOK_S = 10.0
"""Seconds between two checks of the list, since a restarted router has an empty list."""
_WILDCARDS = ("", "0.0.0.0", "[::]")  # noqa: S104 - refused addresses
_FAILURES = (httpx.HTTPError, ValueError, LookupError, TypeError)
"""No answer, or an answer without a list of workers."""
log = get_logger(__name__)


def own_url(config: GatewayConfig, port: int) -> str:
    """The gateway's URL for the router. Raises ConfigError for an address without a host name."""
    host = config.addresses.http.rpartition(":")[0]
    if host in _WILDCARDS:
        raise ConfigError(
            "gateway.engine.sglang.router needs an address that the router can reach",
            seen=f"addresses.http={config.addresses.http}",
            allowed="a name or an address of this host",
        )
    return f"{'https' if config.security.tls_cert else 'http'}://{host}:{port}"


@asynccontextmanager
async def listed(config: GatewayConfig, model: str, port: int) -> AsyncIterator[None]:
    """Inside the block the gateway is in the list of the configured router, if there is one."""
    if not config.engine.sglang.router:
        yield
        return
    entry = RouterEntry(config, model, port)
    entry.start()
    try:
        yield
    finally:
        await entry.stop()


class RouterEntry:
    """This gateway's entry in the router's list, kept until `stop`."""

    def __init__(self, config: GatewayConfig, model: str, port: int) -> None:
        """Raises ConfigError."""
        settings = config.engine.sglang
        self._entry = {"url": own_url(config, port), "model_id": model}
        key = os.environ.get(settings.router_key_env, "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._workers = settings.router.rstrip("/") + "/workers"
        authorities = ssl.create_default_context(cafile=config.security.tls_ca or None)
        options = direct(settings.router, authorities)
        self._client = httpx.AsyncClient(timeout=CALL_S, headers=headers, **options)
        self._task: asyncio.Task[None] | None = None
        self._said = ""  # last reported failure, to report it once

    def start(self) -> None:
        """Register with the router, again after its restarts; waits for an unavailable router."""
        self._task = background(self._keep(), "sglang-router")

    async def stop(self) -> None:
        """Remove the entry. An unreachable router notices the end by its health checks."""
        await cancel(self._task)
        try:
            for one in await self._ours():
                (await self._client.delete(f"{self._workers}/{one['id']}")).raise_for_status()
        except _FAILURES as error:
            log.warning("the SGLang router was not told", router=self._workers, why=repr(error))
        await self._client.aclose()

    async def _keep(self) -> None:
        while True:
            try:
                if not await self._ours():
                    answer = await self._client.post(self._workers, json=self._entry)
                    answer.raise_for_status()
                    log.info("entered at the SGLang router", router=self._workers, **self._entry)
                self._said = ""
            except _FAILURES as error:
                if repr(error) != self._said:
                    self._said = repr(error)
                    log.warning("no SGLang router", router=self._workers, why=self._said)
            await asyncio.sleep(LOOK_S)

    async def _ours(self) -> list[dict[str, Any]]:
        """This gateway's entries in the list. Raises one of _FAILURES."""
        answer = await self._client.get(self._workers)
        answer.raise_for_status()
        listed = answer.json()["workers"]
        return [one for one in listed if one["url"] == self._entry["url"]]
