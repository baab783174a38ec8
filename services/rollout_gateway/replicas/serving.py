"""The gateway's process: the gateway itself, or with `gateway.replicas` the head of several.

Owns the order of start and stop.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from paceline.errors import PacelineError
from paceline.local.forking import Forker
from paceline.local.process_directory import process_directory, socket_directory
from paceline.local.processes import open_many_files, usable_cores
from paceline.local.tokens import example_call
from paceline.rpc import EPOCHS, EpochGuard, Server
from paceline.rpc.progress import add_progress
from paceline.services.rollout_gateway import server as alone
from paceline.services.rollout_gateway.api.sglang_router import listed
from paceline.services.rollout_gateway.background import first_of
from paceline.services.rollout_gateway.calls.aside import LargeRequests
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.open_spool import open_spool
from paceline.services.rollout_gateway.place import check_cores, places
from paceline.services.rollout_gateway.replicas.fleet import Replica, ReplicaFleet
from paceline.services.rollout_gateway.replicas.http import HeadApp
from paceline.services.rollout_gateway.replicas.rollouts import HeadServicer
from paceline.services.rollout_gateway.replicas.routing import SessionRouting
from paceline.services.rollout_gateway.replicas.weights import ReplicaWeights
from paceline.streams import OpenSessions, connect
from paceline.telemetry import get_logger
from paceline.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from paceline.weights import SERVICE_NAME, Spool, add_weight_service

log = get_logger(__name__)


async def serve(config: GatewayConfig, stop: asyncio.Event, forker: Forker | None = None) -> None:
    """Serves until `stop` is set, then closes everything. `forker`: starts the workers of a gateway
    with one process.

    Raises ConfigError for invalid settings, and Unavailable when a replica cannot be restarted.
    """
    open_many_files()
    async with running(config, forker) as head:
        alone.collect_seldom()
        sys.stdout.write(f"{example_call(config, head.http_port)}\n")
        sys.stdout.flush()
        await first_of(head.failed(), _set(stop))


class Head:
    """A running gateway, in one process or several."""

    def __init__(self, grpc_port: int, http_port: int, fleet: ReplicaFleet | None = None) -> None:
        self.grpc_port, self.http_port, self.fleet = grpc_port, http_port, fleet

    async def failed(self) -> None:
        """Never returns; raises when a replica cannot be restarted."""
        if self.fleet is not None:
            await self.fleet.failed()
        await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def running(config: GatewayConfig, forker: Forker | None = None) -> AsyncIterator[Head]:
    """Runs a gateway inside the block."""
    if config.replicas == 1:
        async with alone.running(config, forker=forker) as (grpc_port, http_port):
            yield Head(grpc_port, http_port)
        return
    async with AsyncExitStack() as stack:
        yield await _begin(config, stack)


async def _begin(config: GatewayConfig, stack: AsyncExitStack) -> Head:
    _ = config.model_dir  # an invalid directory is refused before the start
    check_cores(config, usable_cores())
    files, sockets = (
        Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r-", dir=parent)))
        for parent in (process_directory(), socket_directory())
    )
    directory = config.spool or files / "spool"
    spool = open_spool(Spool, directory, config)
    fleet = ReplicaFleet(config, places(config, directory, sockets), directory, files)
    weights = ReplicaWeights(fleet, spool)
    routing, aside = SessionRouting(fleet), LargeRequests()
    stack.callback(aside.stop)
    guard = EpochGuard(config.security, config.spool and config.spool / EPOCHS)
    servicer = HeadServicer(fleet, weights, routing, guard)

    async def equip(replica: Replica) -> None:
        await weights.bring(replica)
        await servicer.equip(replica)

    fleet.on_up = equip
    server = Server(config.addresses.gateway, config.security)
    server.add(add_RolloutServiceServicer_to_server, servicer, alone.ROLLOUT_SERVICE)
    received = alone.receiver(spool, guard, weights, config)
    server.add(add_weight_service, received, SERVICE_NAME)
    add_progress(server, lambda: servicer.progress(received.reception.activity))
    await _take_lost(config)
    stack.push_async_callback(fleet.stop)
    await fleet.start()
    http, task, http_port = await alone.start_http(HeadApp(fleet, routing, aside), config)
    stack.push_async_callback(_stop, server, http, task)
    port = await server.start()
    await stack.enter_async_context(listed(config, config.model_dir.resolve().name, http_port))
    log.info("gateway serves", replicas=config.replicas, grpc_port=port, http_port=http_port)
    return Head(port, http_port, fleet)


async def _stop(server: Server, http: alone.HttpServer, task: asyncio.Task[None]) -> None:
    http.should_exit = True
    await asyncio.gather(server.stop(alone.STOP_GRACE_S), task)


async def _take_lost(config: GatewayConfig) -> None:
    """Marks the open sessions of a former gateway as lost, whatever its number of replicas."""
    if not config.trajectories:
        return
    client = connect(config.redis.durable_url)
    try:
        await OpenSessions(client, config.run.id).take_lost()
    except PacelineError as error:
        log.warning("open sessions of a former gateway are not known yet", error=str(error))
    finally:
        await client.aclose()


async def _set(stop: asyncio.Event) -> None:
    await stop.wait()
