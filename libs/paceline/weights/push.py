"""Sends weights as a client (Prepare, Push, Commit and Abort), and reads served weights.

The module sets deadlines and keeps no state between calls.
"""

import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import grpc

from paceline.errors import DataLoss, FailedPrecondition, NotFound, WeightsError
from paceline.messages import versions_from_proto, versions_to_proto
from paceline.rpc import responses, rpc_errors
from paceline.telemetry import get_logger
from paceline.tensors import NamedTensor
from paceline.trajectory import VersionSet
from paceline.v1 import weights_pb2 as pb
from paceline.v1.engine_pb2 import PAUSE_MODE_IN_PLACE
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights.assembly import Assembly
from paceline.weights.chunks import CheckedRange, mapped_file
from paceline.weights.delta import DELTA_DAMAGED
from paceline.weights.manifest import ENCODING_NAMES, version_name
from paceline.weights.shares import Announced, cut_ranges

SERVICE_NAME = "paceline.v1.WeightService"
_DATA = b"\x7a"
"""Tag of the field `data` of a PushRequest: number 15, length-delimited."""
_log = get_logger(__name__)


def encode_push(head: pb.PushRequest, data: memoryview) -> bytes:
    """A PushRequest with the fields of `head` and the data, as protobuf bytes. The data is copied
    once; the generated class takes fifty times as long.
    """
    length, left = bytearray(), len(data)
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return b"".join((head.SerializeToString(), _DATA, length, data))


Parts = Iterable[CheckedRange] | AsyncIterable[CheckedRange]


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
            stub: Any = WeightServiceStub(self.channel)  # type: ignore[no-untyped-call]
            response: pb.PrepareResponse = await stub.Prepare(request, timeout=self._left_s)
        return response

    async def stream(self, parts: Parts) -> pb.PushResponse:
        """Sends at least one part by the network."""
        push: Any = self.channel.stream_unary(
            f"/{SERVICE_NAME}/Push", response_deserializer=pb.PushResponse.FromString
        )
        with rpc_errors():
            response: pb.PushResponse = await push(self._messages(parts), timeout=self._left_s)
        return response

    @property
    def _left_s(self) -> float:
        return self.ends_s - time.monotonic()

    async def _messages(self, parts: Parts) -> AsyncIterator[bytes]:
        head = pb.PushRequest(target=self.manifest.target, version=self.manifest.version)
        head.context.CopyFrom(self.context)  # of the first message alone
        each = parts if isinstance(parts, AsyncIterable) else _in_turn(parts)
        async for start, data, crc in each:
            head.chunk_index, head.offset = divmod(start, self.manifest.chunk_bytes)
            head.crc32 = crc
            yield encode_push(head, data)
            head.ClearField("context")


async def _in_turn(parts: Iterable[CheckedRange]) -> AsyncIterator[CheckedRange]:
    for part in parts:
        yield part


BASE_DEADLINE_S = 30.0
SLOWEST_BYTES_PER_S = 20e6
"""A push may take the base deadline plus its bytes at this rate, for network, spool and fan-out
together.
"""
REFUSALS = (DataLoss, FailedPrecondition, NotFound)
"""Errors of a set that is not served because a part is missing or damaged."""
COMMAND_DEADLINE_S = 60.0
DAMAGED_TRIES = 3
Cut = Callable[[Iterable[int]], Iterable[CheckedRange]]
"""The sender's parts of each wanted chunk, in ascending order."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """Duration of a push, in seconds. All values are zero except push_s when the receiver already
    had the version.
    """

    bytes: int  # sent by this call
    push_s: float  # from Prepare to the answer of Push, including spool and fan-out
    receive_s: float = 0.0  # receiver: first chunk to all checksums verified in memory
    spool_s: float = 0.0  # receiver: writing the spool
    fan_out_s: float = 0.0  # receiver: loading on its workers
    encoding: str = "full"  # or sparse_delta
    encode_s: float = 0.0  # encoding the delta, or deciding against it
    apply_s: float = 0.0  # receiver: building and checking the content from base and delta
    replaced: bool = False  # receiver: other content of this version was removed
    missing: int = 0  # chunks that other senders must complete


RECEIVERS_TIMES = ("receive_s", "spool_s", "fan_out_s", "apply_s")
"""Fields of PushReport and of PushResponse."""


def push_deadline_s(total_bytes: int) -> float:
    """Default deadline of a push, scaled by its bytes."""
    return BASE_DEADLINE_S + total_bytes / SLOWEST_BYTES_PER_S


async def push_weights(
    channel: grpc.aio.Channel,
    whole: Announced,
    context: CommandContext,
    *,
    deadline_s: float | None = None,
) -> PushReport:
    """Pushes a version that this sender holds as a whole: sends the chunks that the receiver wants.
    Called again after a failure, it sends only the remaining chunks.

    Raises as push_stream, and WeightsError when chunks are missing at the end.
    """
    cut = partial(cut_ranges, whole.manifest, whole.ranges)
    report = await push_stream(channel, whole.manifest, cut, context, deadline_s=deadline_s)
    if report.missing:
        name = version_name(whole.manifest)
        raise WeightsError(f"{name} misses chunks", seen=report.missing, allowed=0)
    return report


async def push_stream(
    channel: grpc.aio.Channel,
    manifest: pb.Manifest,
    cut: Cut,
    context: CommandContext,
    *,
    deadline_s: float | None = None,
) -> PushReport:
    """Pushes the parts from `cut`, all of a version or a share; the report has the number of
    missing chunks. Damaged chunks are sent again, up to DAMAGED_TRIES times in all. A delta that
    the receiver cannot apply is not.

    Raises the receiver's PacelineError: WeightsError, InvalidInput, DataLoss, StaleEpoch,
    ResourceExhausted, Unavailable, DeadlineExceeded.
    """
    started_s = time.monotonic()
    deadline_s = push_deadline_s(manifest.total_bytes) if deadline_s is None else deadline_s
    sending = Sending(channel, manifest, context, started_s + deadline_s)
    for tries_left in reversed(range(DAMAGED_TRIES)):
        try:
            return await _push(sending, cut)
        except DataLoss as error:
            if not tries_left or error.reason == DELTA_DAMAGED:
                raise
            _log.warning("damaged on its way, sent again", error=str(error))
    raise AssertionError("the last try returns or raises")


async def _push(sending: Sending, cut: Cut) -> PushReport:
    started_s = time.monotonic()
    encoding = ENCODING_NAMES[sending.manifest.encoding]
    wanted = await sending.prepare()
    parts = iter(() if wanted.complete else cut(wanted.wanted_chunks))
    first = next(parts, None)
    if first is None:  # the receiver has all of this sender's parts
        missing = len(wanted.wanted_chunks)
        return PushReport(0, time.monotonic() - started_s, encoding=encoding, missing=missing)
    response = await sending.stream(chain([first], parts))
    return PushReport(
        bytes=response.bytes_received,
        push_s=time.monotonic() - started_s,
        replaced=wanted.replaced,
        encoding=encoding,
        **{name: getattr(response, name) for name in RECEIVERS_TIMES},
        missing=response.missing_chunks,
    )


async def commit_versions(
    channel: grpc.aio.Channel,
    context: CommandContext,
    versions: VersionSet,
    mode: int = PAUSE_MODE_IN_PLACE,
    *,
    leased: Iterable[int] = (),
    judge: bool | None = None,
    deadline_s: float = COMMAND_DEADLINE_S,
) -> VersionSet:
    """Makes the receiver serve a set, and returns the serving set. Raises WeightsError when a part
    is absent.

    leased: workers on whose slots a trainer computes. judge: whether a canary tests the set first;
    None: the receiver decides, by its number of workers.
    """
    stub: Any = WeightServiceStub(channel)  # type: ignore[no-untyped-call]
    request = pb.CommitRequest(
        context=context,
        versions=versions_to_proto(versions),
        mode=mode,  # type: ignore[arg-type]
        leased_workers=leased,
        judge=judge,
    )
    with rpc_errors():
        response = await stub.Commit(request, timeout=deadline_s)
    return versions_from_proto(response.versions)


async def abort_version(
    channel: grpc.aio.Channel,
    context: CommandContext,
    target: int,
    version: int,
    *,
    deadline_s: float = COMMAND_DEADLINE_S,
) -> None:
    """Makes the receiver drop a prepared version. Raises WeightsError when it is serving."""
    stub: Any = WeightServiceStub(channel)  # type: ignore[no-untyped-call]
    request = pb.AbortRequest(context=context, target=target, version=version)  # type: ignore[arg-type]
    with rpc_errors():
        await stub.Abort(request, timeout=deadline_s)


async def pull_weights(
    channel: grpc.aio.Channel,
    target: int,
    wanted: Callable[[pb.Manifest], bool],
    *,
    directory: Path,
    deadline_s: float,
) -> list[NamedTensor] | None:
    """The serving tensors in stream order; None unless `wanted` accepts their manifest. They are in
    an unnamed file of the directory.

    Raises DataLoss when the bytes do not match the manifest, InvalidInput for an unacceptable
    manifest, and the errors of the call.
    """
    stub: Any = WeightServiceStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Pull(pb.PullRequest(target=target), timeout=deadline_s)  # type: ignore[arg-type]
    assembly: Assembly | None = None
    allocated = partial(mapped_file, directory=directory)
    with rpc_errors():
        async with aclosing(responses(call)) as stream:
            async for response in stream:
                if assembly is not None:
                    assembly.place(response.chunk)
                elif wanted(response.manifest):
                    assembly = Assembly(response.manifest, allocated)
                else:
                    return None
    if assembly is None or not assembly.complete:
        raise DataLoss("the served version arrived incomplete", seen="end of stream")
    assembly.check_content()
    return assembly.tensors()
