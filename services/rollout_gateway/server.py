"""The gateway's process: gRPC and HTTP on one event loop, started and stopped in order."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

from paceline.addresses import is_loopback, reachable
from paceline.local import checks, forking, processes
from paceline.local.http_server import start_http
from paceline.rpc import EPOCHS, EpochGuard, Server, channel
from paceline.rpc.progress import AGENTS, REDIS, Activity, add_progress
from paceline.services.rollout_gateway.api import grpc
from paceline.services.rollout_gateway.api.http import requests, streaming
from paceline.services.rollout_gateway.api.http.app import build_app
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.telemetry import get_logger
from paceline.v1.progress_pb2 import GetProgressResponse, Part
from paceline.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from paceline.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from paceline.weights import SERVICE_NAME, Spool, WeightServicer
from paceline.weights.servicer import Forward


async def progress(gateway: Gateway, weights: Activity | None = None) -> GetProgressResponse:
    """Progress of the gateway, then of its workers. Sends no command to a worker, because a worker
    may be silent. `weights`: the activity of receiving weights, if this process does.
    """
    seats = gateway.router.seats
    workers = [_worker(seat) for seat in seats]
    agents, queue = gateway.agents, gateway.queue
    counts = {
        "requests_running": queue.running,
        "requests_waiting": queue.waiting,
        "samples_left": gateway.samples_left,
        "open_sessions": len(agents.sessions),
        "offers": len(agents.offers.waiting),
        "open_groups": len(agents.groups.gathering),
        "unsent_bytes": gateway.outbox.unsent_bytes,
    }
    busy = [worker for worker in workers if worker.doing]
    part = gateway.activity.part(counts)
    if weights is not None:
        weights.show_on(part)
    part.still_s = min([part.still_s, *(one.still_s for one in workers)])
    if busy:
        part.waits_for = max(busy, key=lambda one: one.still_s).name
    elif counts["unsent_bytes"]:
        part.waits_for = REDIS
    elif part.doing and (counts["offers"] or counts["open_sessions"] or not counts["samples_left"]):
        part.waits_for = AGENTS
    return GetProgressResponse(parts=[part, *workers])


def _worker(seat: Seat) -> Part:
    process = seat.process
    trouble = processes.stopped([process.pid]) if process else "it is being started"
    part = seat.activity.part({"requests": len(seat.live)} if process else None, trouble=trouble)
    part.ClearField("last_span")  # the span belongs to this process, not to the worker
    if process is not None and process.unanswered:
        part.doing = part.doing or "takes a command"
        part.still_s = min(part.still_s, process.still_s)
    return part


ROLLOUT_SERVICE = "paceline.v1.RolloutService"
STOP_GRACE_S = 2.0
COLLECT_AFTER = 10_000
"""New objects after which Python searches for cycles. With Python's default of 700, a gateway with
10,000 sessions spent a quarter of its CPU time in pauses of a second.
"""
log = get_logger(__name__)


@contextlib.asynccontextmanager
async def running(
    config: GatewayConfig, forker: forking.Forker | None = None
) -> AsyncIterator[tuple[int, int]]:
    """A gateway inside the block; yields its gRPC and HTTP ports."""
    gateway = Gateway(config, forker)
    guard = EpochGuard(config.security, gateway.state and gateway.state / EPOCHS)
    server = Server(config.addresses.gateway, config.security)
    forward = _forward(config, gateway.spool)
    weights = WeightServicer(gateway.spool, guard, gateway.weights, forward=forward)
    server.add(add_WeightServiceServicer_to_server, weights, SERVICE_NAME)
    rollouts = grpc.RolloutServicer(gateway, guard)
    server.add(add_RolloutServiceServicer_to_server, rollouts, ROLLOUT_SERVICE)
    add_progress(server, lambda: progress(gateway, weights.reception.activity))
    probe = asyncio.create_task(_compare_reading(config))
    try:
        await gateway.start()
    except BaseException:
        await cancel(probe)
        raise
    longest = gateway.router.ready.max_sequence_tokens
    server.caps[f"/{ROLLOUT_SERVICE}/Generate"] = requests.most_bytes(longest)
    try:
        await probe
        app = build_app(gateway, loopback=is_loopback(config.addresses.http))
        http, http_task, http_port = start_http(
            app,
            config.addresses.http,
            config.security,
            http=streaming.BoundedProtocol,
            timeout_keep_alive=config.api.keep_alive_s,
            timeout_graceful_shutdown=int(STOP_GRACE_S),
        )
        gateway.http_address = reachable(config.addresses.http, http_port)
        try:
            port = await server.start()
            gateway.lending.start()
            log.info("gateway serves", model=gateway.model, grpc_port=port, http_port=http_port)
            yield port, http_port
        finally:
            gateway.agents.offers.stop()
            await gateway.lending.stop()
            gateway.router.traffic.stop()
            await gateway.router.keeper.stop_keeping()
            http.should_exit = True
            await asyncio.gather(server.stop(STOP_GRACE_S), http_task)
    finally:
        await rollouts.runs.stop()
        if forward is not None:
            await forward.close()
        await gateway.stop()


def _forward(config: GatewayConfig, spool: Spool) -> Forward | None:
    """Sends versions on to the next gateway of the run; None for the last gateway."""
    following = config.all_addresses.gateways[config.number + 1 :]
    return Forward(channel(following[0], config.security), spool) if following else None


async def _compare_reading(config: GatewayConfig) -> None:
    """Compare the reading of the model with transformers', while the engine starts.

    Raises ConfigError if text would be misread. Does nothing for an engine that does not ask for
    it.
    """
    if not find_engine(config.engine.kind).compares_text:
        return
    tokenizer = Path(config.tokenizer) if config.tokenizer else None
    for line in await asyncio.to_thread(checks.check_reading, config.model_dir, tokenizer):
        log.warning("the model is read in another way than by transformers", difference=line)


def collect_seldom() -> None:
    """Keep Python's cycle search away from all objects that exist, and run the search less often.

    For a process that serves until its end.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
