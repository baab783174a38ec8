"""Reads served weights from a receiver as tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc

from paceline.errors import DataLoss
from paceline.rpc import responses, rpc_errors
from paceline.tensors import NamedTensor
from paceline.v1 import weights_pb2 as pb
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights.assembly import Assembly
from paceline.weights.handover import ScratchFile
from paceline.weights.memory import allocate
from paceline.weights.wire import PushChunk


async def pull_weights(
    channel: grpc.aio.Channel,
    target: int,
    wanted: Callable[[pb.Manifest], bool],
    *,
    deadline_s: float,
    directory: Path | None = None,
) -> list[NamedTensor] | None:
    """The serving tensors in stream order; None unless `wanted` accepts their manifest. They are in
    an unnamed file of the directory, or in memory.

    Raises DataLoss when the bytes do not match the manifest, InvalidInput for an unacceptable
    manifest, and the errors of the call.
    """

    def allocated(nbytes: int) -> memoryview:
        return allocate(nbytes) if directory is None else ScratchFile(nbytes, directory).memory

    stub: Any = WeightServiceStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Pull(pb.PullRequest(target=target), timeout=deadline_s)  # type: ignore[arg-type]
    assembly: Assembly | None = None
    with rpc_errors():
        async with aclosing(responses(call)) as stream:
            async for response in stream:
                if assembly is not None:
                    assembly.place(_chunk(response.chunk))
                elif wanted(response.manifest):
                    assembly = Assembly(response.manifest, allocated)
                else:
                    return None
    if assembly is None or not assembly.complete:
        raise DataLoss("what serves did not come whole", seen="end of stream")
    assembly.check_content()
    return assembly.tensors()


def _chunk(message: pb.PushRequest) -> PushChunk:
    return PushChunk(
        message.target,
        message.version,
        message.chunk_index,
        message.crc32,
        memoryview(message.data),
    )
