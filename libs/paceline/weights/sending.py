"""Sends parts of a version to a receiver, as a stream of messages or as a file on its host."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.errors import InvalidInput
from paceline.rpc import rpc_errors
from paceline.telemetry import get_logger
from paceline.v1 import weights_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights.chunks import ChunkPart
from paceline.weights.handover import HANDOVER, ScratchFile
from paceline.weights.service import SERVICE_NAME
from paceline.weights.wire import PushChunk, encode_push

RANGES_A_CALL = 1 << 16
"""Ranges per call for a handed-over file; the message stays far below the servers' cap."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sending:
    """Sends one version to one receiver, until a time of the monotonic clock. Each call raises the
    receiver's PacelineErrors.
    """

    channel: grpc.aio.Channel
    manifest: pb.Manifest
    context: CommandContext
    ends_s: float

    async def prepare(self) -> pb.PrepareResponse:
        """Announces the version; returns the wanted chunks."""
        request = pb.PrepareRequest(context=self.context, manifest=self.manifest)
        with rpc_errors():
            response: pb.PrepareResponse = await self._stub.Prepare(request, timeout=self._left_s)
        return response

    async def stream(
        self, parts: Iterable[ChunkPart] | AsyncIterable[ChunkPart]
    ) -> pb.PushResponse:
        """Sends at least one part by the network."""
        push: Any = self.channel.stream_unary(
            f"/{SERVICE_NAME}/Push", response_deserializer=pb.PushResponse.FromString
        )
        with rpc_errors():
            response: pb.PushResponse = await push(self._messages(parts), timeout=self._left_s)
        return response

    async def hand_over(
        self, parts: Sequence[ChunkPart], file: ScratchFile, directory: str
    ) -> pb.PushResponse | None:
        """Hands over the file with at least one part; the file has a name in the receiver's
        directory meanwhile. Returns None if the file cannot have a name there, or if the receiver
        refuses it.
        """
        received = 0
        try:
            with file.named(directory) as name:
                for at in range(0, len(parts), RANGES_A_CALL):
                    request = self._take_request(name, parts[at : at + RANGES_A_CALL])
                    with rpc_errors():
                        response = await self._stub.Take(request, timeout=self._left_s)
                    received += response.taken.bytes_received
        except (OSError, InvalidInput) as error:
            if isinstance(error, InvalidInput) and error.reason != HANDOVER:
                raise
            _log.warning("not_handed_over", error=str(error))
            return None
        taken: pb.PushResponse = response.taken
        taken.bytes_received = received
        return taken

    @property
    def _stub(self) -> Any:
        return WeightServiceStub(self.channel)  # type: ignore[no-untyped-call]

    @property
    def _left_s(self) -> float:
        return self.ends_s - time.monotonic()

    async def _messages(
        self, parts: Iterable[ChunkPart] | AsyncIterable[ChunkPart]
    ) -> AsyncIterator[bytes]:
        target, version = self.manifest.target, self.manifest.version
        first: CommandContext | None = self.context
        each = parts if isinstance(parts, AsyncIterable) else _in_turn(parts)
        async for index, offset, data, crc, _ in each:
            yield encode_push(PushChunk(target, version, index, crc, data, first, offset))
            first = None

    def _take_request(self, name: str, parts: Iterable[ChunkPart]) -> pb.TakeRequest:
        return pb.TakeRequest(
            context=self.context,
            target=self.manifest.target,
            version=self.manifest.version,
            file=name,
            ranges=(
                pb.FileRange(
                    start=one.chunk * self.manifest.chunk_bytes + one.offset,
                    position=one.position,
                    nbytes=len(one.data),
                    crc32=one.crc32,
                )
                for one in parts
            ),
        )


async def _in_turn(parts: Iterable[ChunkPart]) -> AsyncIterator[ChunkPart]:
    for part in parts:
        yield part
