"""The front's process: HTTP for the SDK, gRPC for health and progress."""

import asyncio
import json
from pathlib import Path

from paceline.errors import ConfigError
from paceline.local.http_server import start_http
from paceline.local.patience import unless
from paceline.rpc import Server, channel, leased
from paceline.rpc.progress import Activity, add_progress
from paceline.services.tinker.api import KEY_PREFIX, Api
from paceline.services.tinker.clients import Clients
from paceline.services.tinker.config import TinkerConfig
from paceline.services.tinker.drafter import DrafterLeases
from paceline.services.tinker.front import TinkerFront
from paceline.services.tinker.futures import Futures
from paceline.services.tinker.samplers import Samplers
from paceline.services.tinker.trainer import Trainer
from paceline.telemetry import get_logger
from paceline.v1.progress_pb2 import GetProgressResponse
from paceline.whole_files import write_whole

_GRACE_S = 2.0
_SAVES = 1 << 30
"""Checkpoints of one process at most; their numbers rise over processes."""
_log = get_logger(__name__)


def next_epoch(config: TinkerConfig) -> int:
    """The epoch of this process's commands, above the epochs of its predecessors in the run."""
    file = config.folder / "epoch.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    epoch = 1 + (json.loads(file.read_text())["epoch"] if file.exists() else 0)
    write_whole(file, json.dumps({"epoch": epoch}))
    return int(epoch)


async def serve(config: TinkerConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Raises ConfigError for an invalid address or a missing model."""
    if not (Path(config.model) / "config.json").is_file():
        raise ConfigError("no model is there", seen=config.model, allowed="tinker.model=DIR")
    epoch = next_epoch(config)
    context = leased(config.security, config.run.id, 0, epoch)
    addresses, security = config.addresses, config.security
    activity = Activity("tinker")
    server = Server(addresses.tinker, security)

    async def progress() -> GetProgressResponse:
        return GetProgressResponse(parts=[activity.part()])

    add_progress(server, progress)
    async with (
        channel(addresses.policy_trainer, security) as to_trainer,
        channel(addresses.gateway, security) as to_gateway,
        channel(addresses.drafter_trainer, security) as to_drafter,
    ):
        trainer = Trainer(to_trainer, context)
        futures = Futures(config.kept_futures, config.kept_bytes)
        clients = Clients(trainer, futures, config.gap_s, first_save=epoch * _SAVES)
        leases = DrafterLeases(config, to_gateway, to_drafter, context)
        samplers = Samplers(trainer, to_gateway, context, config.parallel_samples, leases)
        await samplers.begin()
        front = TinkerFront(config, futures, clients, samplers)
        app = Api(front).app()
        http, http_task, port = start_http(
            app, addresses.tinker_http, security, timeout_graceful_shutdown=int(_GRACE_S)
        )
        try:
            await server.start()
            _log.info("tinker serves", model=front.model, http_port=port, keys=f"{KEY_PREFIX}TOKEN")
            await unless(stop, clients.run())
        finally:
            http.should_exit = True
            await asyncio.gather(server.stop(_GRACE_S), http_task)
