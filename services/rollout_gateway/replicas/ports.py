"""Says to hosts of engine workers at which port each replica is joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import InvalidInput
from paceline.local.ports import split_address
from paceline.services.rollout_gateway.place import ReplicaPlace
from paceline.v1 import workers_pb2 as pb
from paceline.v1.workers_pb2_grpc import WorkerHostServiceServicer


class ReplicaPorts(WorkerHostServiceServicer):
    """The head's WorkerHostService: hosts join the replicas themselves."""

    def __init__(self, places: Sequence[ReplicaPlace]) -> None:
        self._places = places

    async def FindReplica(
        self, request: pb.FindReplicaRequest, context: Any
    ) -> pb.FindReplicaResponse:
        """Raises InvalidInput for a replica that is none."""
        if request.replica >= len(self._places):
            allowed = f"0 to {len(self._places) - 1}"
            raise InvalidInput("no such replica", seen=request.replica, allowed=allowed)
        place = self._places[request.replica]
        return pb.FindReplicaResponse(port=split_address(place.hosts_address)[1])
