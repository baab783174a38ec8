"""A receiver of weights behind real gRPC, and handmade senders."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from whole_versions import build_manifest, push_weights

from paceline.config import SecurityConfig
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.rpc import EpochGuard, Server, channel, rpc_errors
from paceline.tensors import NamedTensor, from_numpy
from paceline.trajectory import VersionSet
from paceline.v1 import weights_pb2 as pb
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER, WEIGHT_TARGET_POLICY
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceStub, add_WeightServiceServicer_to_server
from paceline.weights import SERVICE_NAME, PushReport, Spool, WeightServicer, commit_versions
from paceline.weights.chunks import chunk_span
from paceline.weights.servicer import Forward

P, D = WEIGHT_TARGET_POLICY, WEIGHT_TARGET_DRAFTER
CONTEXT = CommandContext(run_id="local", step=1, epoch=3)
CHUNK = 4096


@dataclass
class Recorder:
    """Hooks that record their arguments, and fail on demand."""

    told: list[tuple[object, ...]] = field(default_factory=list)
    fail: set[str] = field(default_factory=set)
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    may_load: asyncio.Event = field(default_factory=lambda: _set(asyncio.Event()))

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        self.loading.set()
        await asyncio.wait_for(self.may_load.wait(), patient(10))
        self._note("prepared", target, version, path.name)

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None:
        self._note("commit", versions, mode)

    async def on_abort(self, target: int, version: int) -> None:
        self._note("abort", target, version)

    def _note(self, what: str, *facts: object) -> None:
        if what in self.fail:
            raise Unavailable(f"{what} fails")
        self.told.append((what, *facts))


def _set(event: asyncio.Event) -> asyncio.Event:
    event.set()
    return event


@dataclass
class Receiver:
    """One running receiver and a channel to it."""

    channel: grpc.aio.Channel
    hooks: Recorder
    spool: Spool
    servicer: WeightServicer

    async def push(self, target: int, version: int, seed: int | None = None) -> list[NamedTensor]:
        given = tensors(version if seed is None else seed)
        await self.deliver(manifest_of(given, target, version), given)
        return given

    async def deliver(
        self, manifest: pb.Manifest, given: list[NamedTensor], context: CommandContext = CONTEXT
    ) -> PushReport:
        return await push_weights(self.channel, manifest, given, context, deadline_s=10)

    async def commit(self, seq: int, policy: int, drafter: int) -> VersionSet:
        return await commit_versions(
            self.channel, CONTEXT, VersionSet(seq, policy, drafter), deadline_s=10
        )


Start = Callable[..., Awaitable[Receiver]]


def tensors(seed: int) -> list[NamedTensor]:
    """Three tensors; their borders are inside chunks."""
    rng = np.random.default_rng(seed)
    return [
        from_numpy("a", rng.standard_normal((50, 33)).astype(np.float32)),
        from_numpy("b", rng.standard_normal((5, 7, 11)).astype(np.float16)),
        from_numpy("c", rng.standard_normal(9000)),
    ]


def manifest_of(given: list[NamedTensor], target: int, version: int) -> pb.Manifest:
    return build_manifest(
        target, version, given, chunk_bytes=CHUNK, metadata={"speculator": "eagle"}
    )


def cut_chunks(
    manifest: pb.Manifest, given: list[NamedTensor], indices: Iterable[int]
) -> Iterator[tuple[int, bytes]]:
    """(index, bytes) of chunks, with the bytes of the content."""
    content = b"".join(one.view for one in given)
    return ((index, content[slice(*chunk_span(manifest, index))]) for index in indices)


def push_request(
    index: int,
    data: memoryview | bytes,
    context: CommandContext | None = None,
    target: int = P,
    version: int = 1,
) -> pb.PushRequest:
    """A chunk with its checksum."""
    return pb.PushRequest(
        target=target,
        version=version,
        chunk_index=index,
        crc32=zlib.crc32(data),
        data=bytes(data),
        context=context,
    )


async def send(
    to: grpc.aio.Channel,
    given: list[NamedTensor],
    manifest: pb.Manifest,
    indices: list[int],
    spoil: Callable[[pb.PushRequest], pb.PushRequest] = lambda chunk: chunk,
) -> pb.PushResponse:
    """Calls Prepare and sends handmade chunks."""
    stub = WeightServiceStub(to)
    push = to.stream_unary(
        f"/{SERVICE_NAME}/Push", response_deserializer=pb.PushResponse.FromString
    )

    async def messages() -> AsyncIterator[bytes]:
        first: CommandContext | None = CONTEXT
        for index, data in cut_chunks(manifest, given, indices):
            chunk = push_request(index, data, first, manifest.target, manifest.version)
            yield spoil(chunk).SerializeToString()
            first = None

    with rpc_errors():
        await stub.Prepare(
            pb.PrepareRequest(context=CONTEXT, manifest=manifest), timeout=patient(10)
        )
        response: pb.PushResponse = await push(messages(), timeout=patient(10))
        return response


async def wanted(to: grpc.aio.Channel, manifest: pb.Manifest) -> pb.PrepareResponse:
    with rpc_errors():
        return await WeightServiceStub(to).Prepare(
            pb.PrepareRequest(context=CONTEXT, manifest=manifest), timeout=patient(10)
        )


@asynccontextmanager
async def receivers(directory: Path) -> AsyncIterator[Start]:
    """Starts receivers over one spool in sequence, as after kills."""
    servers: list[Server] = []
    channels: list[grpc.aio.Channel] = []

    async def start_one(
        port: int = 0, following: grpc.aio.Channel | None = None, **options: object
    ) -> Receiver:
        """`following`: channel to the receiver that gets each version from this receiver."""
        hooks, spool = Recorder(), Spool(directory / "spool")
        if following is not None:
            options["forward"] = Forward(following, spool)
        servicer = WeightServicer(spool, EpochGuard(SecurityConfig()), hooks, **options)
        server = Server(f"127.0.0.1:{port}", SecurityConfig())
        server.add(add_WeightServiceServicer_to_server, servicer, SERVICE_NAME)
        port = await server.start()
        servers.append(server)
        channels.append(channel(f"127.0.0.1:{port}", SecurityConfig()))
        return Receiver(channels[-1], hooks, spool, servicer)

    yield start_one
    for one in channels:
        await one.close()
    for server in servers:
        await server.stop(0)
