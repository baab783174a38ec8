"""Reads the queue lengths and serving versions of a run: requests, stream entries, version sets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.cli.access import DEADLINE_S
from paceline.config import ServiceConfig
from paceline.errors import PacelineError
from paceline.local.redis import resolved
from paceline.messages import versions_from_proto
from paceline.rpc import channel, rpc_errors
from paceline.streams import RedisStream, connect, run_key
from paceline.v1.coordinator_pb2 import GetSnapshotRequest
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from paceline.v1.rollout_pb2 import GetStatusRequest, GetStatusResponse
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.v1.weights_pb2 import GetVersionsRequest, GetVersionsResponse
from paceline.v1.weights_pb2_grpc import WeightServiceStub

_MIB = 1 << 20


async def read_queues(config: ServiceConfig) -> dict[str, str]:
    """Figures by name, as text, without unreachable services."""

    async def answer(read: Callable[[ServiceConfig], Awaitable[dict[str, str]]]) -> dict[str, str]:
        try:
            async with asyncio.timeout(DEADLINE_S):  # Redis retries for longer
                return await read(config)
        except (PacelineError, TimeoutError):
            return {}  # the service restarts or has ended

    gateway, coordinator, streams = await asyncio.gather(
        *map(answer, (_gateways, _coordinator, _streams))
    )
    return gateway | coordinator | streams


async def _asked(
    address: str, config: ServiceConfig
) -> tuple[GetStatusResponse, GetVersionsResponse]:
    async with channel(address, config.security) as connection:
        rollout = RolloutServiceStub(connection)  # type: ignore[no-untyped-call]
        weights = WeightServiceStub(connection)  # type: ignore[no-untyped-call]
        with rpc_errors():
            status = await rollout.GetStatus(GetStatusRequest(), timeout=DEADLINE_S)
            known = await weights.GetVersions(GetVersionsRequest(), timeout=DEADLINE_S)
    return status, known


async def _gateways(config: ServiceConfig) -> dict[str, str]:
    """Figures summed over all gateways, the versions that all have, and the sets that serve."""
    found = await asyncio.gather(*(_asked(one, config) for one in config.addresses.gateways))
    statuses, known = [status for status, _ in found], [versions for _, versions in found]
    healths = [worker.health for status in statuses for worker in status.workers]
    prepared = [
        [*(f"p{one}" for one in own.prepared_policy), *(f"d{one}" for one in own.prepared_drafter)]
        for own in known
    ]
    pushed = [one for one in prepared[0] if all(one in own for own in prepared)]
    sets = dict.fromkeys(str(versions_from_proto(own.versions)) for own in known)
    return {
        "requests running": str(sum(one.running for one in healths)),
        "requests waiting": str(sum(one.waiting for one in healths)),
        "open sessions": str(sum(status.open_sessions for status in statuses)),
        "unsent": f"{sum(status.unsent_bytes for status in statuses) / _MIB:.1f} MiB",
        "serving": ", ".join(sets),
        "pushed": ", ".join(pushed) or "none",
    }


async def _coordinator(config: ServiceConfig) -> dict[str, str]:
    async with channel(config.addresses.coordinator, config.security) as connection:
        stub = CoordinatorServiceStub(connection)  # type: ignore[no-untyped-call]
        with rpc_errors():
            snapshot = await stub.GetSnapshot(GetSnapshotRequest(), timeout=DEADLINE_S)
    drafters = snapshot.drafters
    return {"promoted": f"d{drafters.promoted}" if drafters.HasField("promoted") else "none"}


async def _streams(config: ServiceConfig) -> dict[str, str]:
    urls = resolved(config).redis
    streams: dict[str, Callable[[], Any]] = {
        "trajectories": lambda: connect(urls.durable_url),
        "features": lambda: connect(urls.features),
    }
    found = {}
    for name, opened in streams.items():
        client = opened()
        stream = RedisStream(client, run_key(config.run.id, name))
        try:
            depth = await stream.depth()
        finally:
            await stream.close()
            await client.aclose()
        found[name] = f"{depth.entries} entries, {depth.bytes / _MIB:.1f} MiB"
    return found
