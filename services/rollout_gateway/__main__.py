"""`python -m paceline.services.rollout_gateway`: the gateway process."""

from __future__ import annotations

import asyncio

from paceline.local.importing import uncollected

with uncollected():
    from paceline.local.entry import run_service
    from paceline.local.forking import Forker
    from paceline.services.rollout_gateway.config import GatewayConfig
    from paceline.services.rollout_gateway.engines import find_engine


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. The forker of the workers imports torch while this process imports
    the rest of the gateway.

    Raises the errors of replicas/serving.py.
    """
    forker = None
    if config.replicas == 1:
        forker = Forker(find_engine(config.engine.kind).forked, None)
        await forker.begin()
    try:
        with uncollected():
            from paceline.services.rollout_gateway.replicas import serving
        await serving.serve(config, stop, forker)
    finally:
        if forker is not None:
            await forker.close()


if __name__ == "__main__":
    run_service("gateway", GatewayConfig, serve)
