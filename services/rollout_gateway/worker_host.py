"""`python -m paceline.services.rollout_gateway.worker_host --host N`: holds engine workers on a
host that is not the gateway's. Imports no torch.
"""

from __future__ import annotations

import asyncio

from paceline.local.held import check_number, hold_until, run_held
from paceline.local.services import WORKER_HOST
from paceline.local.tokens import use_run_tokens
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.worker_hosts import held_workers


async def serve(config: GatewayConfig, stop: asyncio.Event, *, host: int) -> None:
    """Holds the workers of this host for the gateway, whenever that is there, until `stop` is set.
    Raises ConfigError and InvalidInput for a host that the gateway does not take.
    """
    check_number(host, config.engine.hosts, "gateway.engine.hosts", "gateway", "workers")
    use_run_tokens(config)
    held, address = held_workers(config, host), config.addresses.gateway
    try:
        await hold_until(stop, lambda s: held.hold(address, config.security, s), "gateway")
    finally:
        await held.close()


if __name__ == "__main__":
    run_held(__spec__.name, WORKER_HOST, GatewayConfig, "gateway", serve)
