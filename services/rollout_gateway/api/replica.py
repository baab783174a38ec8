"""ReplicaService over gRPC: a replica gets versions and sets from its head."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from paceline.messages import versions_from_proto
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.runs.open import OpenRuns
from paceline.v1 import replica_pb2 as pb
from paceline.v1.replica_pb2_grpc import ReplicaServiceServicer


class ReplicaServicer(ReplicaServiceServicer):
    """The methods of replica.proto. The head makes one call at a time."""

    def __init__(self, gateway: Gateway, open_runs: OpenRuns) -> None:
        self._gateway = gateway
        self._open_runs = open_runs

    async def LoadVersion(
        self, request: pb.LoadVersionRequest, context: Any
    ) -> pb.LoadVersionResponse:
        path = Path(request.path)
        await self._gateway.weights.on_prepared(request.target, request.version, path)
        return pb.LoadVersionResponse()

    async def ServeSet(self, request: pb.ServeSetRequest, context: Any) -> pb.ServeSetResponse:
        versions, leased = versions_from_proto(request.versions), [*request.leased_workers]
        weights = self._gateway.weights
        if versions != weights.versions:
            await weights.on_commit(versions, request.mode, leased, judge=request.judge)
        return pb.ServeSetResponse()

    async def ForgetVersion(
        self, request: pb.ForgetVersionRequest, context: Any
    ) -> pb.ForgetVersionResponse:
        await self._gateway.weights.on_abort(request.target, request.version)
        return pb.ForgetVersionResponse()

    async def WatchGroups(
        self, request: pb.WatchGroupsRequest, context: Any
    ) -> AsyncIterator[pb.WatchGroupsResponse]:
        async with aclosing(self._gateway.agents.groups.waiting()) as counts:
            async for closed in counts:
                yield pb.WatchGroupsResponse(closed=closed)

    async def TakeGroups(
        self, request: pb.TakeGroupsRequest, context: Any
    ) -> pb.TakeGroupsResponse:
        taken = await self._open_runs.give(request.context, request.most, last=request.last)
        return pb.TakeGroupsResponse(taken=taken)
