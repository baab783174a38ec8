"""Entry of a replica, which its head starts: `python -m
paceline.services.rollout_gateway.replicas.process FILE`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from paceline.local.importing import uncollected

with uncollected():
    from paceline.local.entry import run_part
    from paceline.local.processes import open_many_files
    from paceline.services.rollout_gateway.config import GatewayConfig
    from paceline.services.rollout_gateway.place import read_place
    from paceline.services.rollout_gateway.server import collect_seldom, running

if __name__ == "__main__":
    place, config = read_place(Path(sys.argv[1]))

    async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
        """Serves until `stop` is set."""
        open_many_files()
        async with running(config, place):
            collect_seldom()
            await stop.wait()

    run_part(place.name, config, serve)
