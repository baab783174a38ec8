"""`python -m paceline.services.rollout_gateway [--gateway N]`: the process of one gateway."""

import asyncio
import sys

from paceline.local.importing import uncollected

with uncollected():
    from paceline.local.entry import run_service
    from paceline.local.forking import Forker
    from paceline.local.processes import open_many_files
    from paceline.local.tokens import example_call
    from paceline.services.rollout_gateway.config import GatewayConfig
    from paceline.services.rollout_gateway.engines import find_engine


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. The forker of the workers imports torch while this process imports
    the rest of the gateway.
    """
    open_many_files()
    forker = Forker(find_engine(config.engine.kind).forked, None)
    await forker.begin()
    try:
        with uncollected():
            from paceline.services.rollout_gateway.server import collect_seldom, running
        async with running(config, forker) as (_, http_port):
            collect_seldom()
            sys.stdout.write(f"{example_call(config, http_port)}\n")
            sys.stdout.flush()
            await stop.wait()
    finally:
        await forker.close()


if __name__ == "__main__":
    run_service("gateway", GatewayConfig, serve, numbered=GatewayConfig.of_gateway)
