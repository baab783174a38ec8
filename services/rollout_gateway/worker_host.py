"""`python -m paceline.services.rollout_gateway.worker_host --host N`: holds engine workers on a
host that is not the gateway's. Imports no torch.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from paceline.local.held import check_number, hold_until, run_held
from paceline.local.services import WORKER_HOST
from paceline.local.tokens import use_run_tokens
from paceline.rpc import channel, rpc_errors, wait_ready
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.worker_hosts import held_workers
from paceline.services.rollout_gateway.workers.hosting import WorkerHost
from paceline.v1 import workers_pb2 as pb
from paceline.v1.workers_pb2_grpc import WorkerHostServiceStub


async def serve(config: GatewayConfig, stop: asyncio.Event, *, host: int) -> None:
    """Holds the workers of this host for the gateway, whenever that is there, until `stop` is set.
    Raises ConfigError and InvalidInput for a host that the gateway does not take.
    """
    check_number(host, config.engine.hosts, "gateway.engine.hosts", "gateway", "workers")
    use_run_tokens(config)
    held = held_workers(config, host)
    holding = [
        asyncio.create_task(hold_until(stop, partial(_hold, one, number, config), "gateway"))
        for number, one in held.of_replicas.items()
    ]
    try:
        await asyncio.gather(*holding)
    finally:
        await cancel(*holding)
        await held.close()


async def _hold(held: WorkerHost, replica: int, config: GatewayConfig, connect_s: float) -> None:
    """Joins the gateway, or that replica at the port that the gateway says."""
    address, security = config.addresses.gateway, config.security
    if config.replicas > 1:
        async with channel(address, security) as peer:
            await wait_ready(peer, connect_s)
            stub: Any = WorkerHostServiceStub(peer)  # type: ignore[no-untyped-call]
            with rpc_errors():
                request = pb.FindReplicaRequest(replica=replica)
                found = await stub.FindReplica(request, timeout=connect_s)
        address = f"{address.rpartition(':')[0]}:{found.port}"
    await held.hold(address, security, connect_s)


if __name__ == "__main__":
    run_held(__spec__.name, WORKER_HOST, GatewayConfig, "gateway", serve)
