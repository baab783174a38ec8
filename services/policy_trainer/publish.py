"""Turns sharded weights into a version with each rank's rows, and adopts the weights that the
gateway serves.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DataLoss, PacelineError, ResourceExhausted
from paceline.local.patience import patient
from paceline.models.adapters import AddedAdapters
from paceline.ranks.messages import Failed
from paceline.rpc import channel, rpc_errors, wait_ready
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.weights import EMBEDDING, HEAD
from paceline.services.policy_trainer.metrics import HEADS_LEFT_OUT
from paceline.telemetry import get_logger
from paceline.tensors import ADAPTERS, NamedTensor, TensorLayout, head_hash_of
from paceline.training import process, shards
from paceline.v1 import trajectory_pb2, weights_pb2_grpc
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY, WEIGHT_TARGET_POLICY_HEAD
from paceline.v1.weights_pb2 import GetVersionsRequest, Manifest
from paceline.weights import Parcel, PushReport, WeightSender, pull_weights
from paceline.weights.chunks import room_for
from paceline.weights.manifest import layouts as layouts_of
from paceline.weights.manifest import unchecked_manifest
from paceline.weights.push import push_deadline_s
from paceline.weights.sender import Outcome
from paceline.weights.shares import Announced, HeldTensor, Senders, check_share

CONNECT_S = 5.0
"""Seconds to connect to the gateway or the drafter trainer."""
_log = get_logger(__name__)
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@dataclass(frozen=True, slots=True)
class Publication:
    """One version with this rank's rows."""

    policy: Announced  # model.safetensors: without a tied lm_head, or adapters
    head: Announced  # embed_tokens, and lm_head unless both are tied


def senders_of_ranks() -> Senders:
    """The ranks of the process group, which push together."""
    return Senders(dist.get_rank(), process.from_all_ranks)


def publication_of(
    version: int,
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    config: PolicyTrainerConfig,
    make_room: Callable[[], None] | None = None,
    added: AddedAdapters | None = None,
) -> Publication:
    """This rank's rows of the weights, converted to the serving type. `weights` must have the order
    of `shapes`. Collective.

    `added`: the version consists of adapters, without embedding and head. Raises ResourceExhausted
    on all ranks if a rank has no space even after `make_room`. Raises WeightsError on all ranks for
    a non-finite number.
    """
    dtypes = dict.fromkeys(shapes, getattr(torch, config.publish_dtype))
    if added is not None:  # engines identify the start's head by these bytes
        dtypes |= {one: getattr(torch, added.stored) for one in dtypes if one in (EMBEDDING, HEAD)}
    layouts = [
        TensorLayout(name, _NAMES[dtypes[name]], tuple(shape)) for name, shape in shapes.items()
    ]
    held = [_held(layout) for layout in layouts]
    buffer = _room_of_each_rank(sum(one.nbytes for one in held), config, make_room)
    tensors, offset = {}, 0
    for (name, weight), own in zip(weights, held, strict=True):
        assert name == own.name, f"{name} comes in the place of {own.name}"
        data = buffer[offset : offset + own.nbytes]
        offset += own.nbytes
        tensors[name] = NamedTensor(name, own.dtype, own.shape, data)
        rows = shards.local_of(weight)
        assert rows.shape == own.shape, f"{name} is sharded otherwise than by rows"
        if own.nbytes:
            shards.convert(rows, torch.frombuffer(data, dtype=dtypes[name]).view(own.shape))
    return _announced(version, layouts, tensors, added)


def _held(layout: TensorLayout) -> TensorLayout:
    """The layout of this rank's rows of a tensor."""
    rows = _rows(layout)
    return TensorLayout(layout.name, layout.dtype, (rows.stop - rows.start, *layout.shape[1:]))


def _rows(layout: TensorLayout) -> slice:
    return shards.rows_of(layout.shape[0], dist.get_world_size(), dist.get_rank())


def _announced(
    version: int,
    layouts: Sequence[TensorLayout],
    tensors: Mapping[str, NamedTensor],
    added: AddedAdapters | None,
) -> Publication:
    """Two manifests, complete on every rank. Collective."""
    head = tensors.get(HEAD, tensors[EMBEDDING])
    name = process.from_rank_zero(head_hash_of(shards.bytes_in_order(head.view)))
    heads = [one for one in layouts if one.name in (EMBEDDING, HEAD)]
    own = [one for one in layouts if added is None or one not in heads]
    metadata = {} if added is None else {ADAPTERS: added.text()}
    policy = unchecked_manifest(
        WEIGHT_TARGET_POLICY, version, own, lm_head_hash=name, metadata=metadata
    )
    whole = unchecked_manifest(WEIGHT_TARGET_POLICY_HEAD, version, heads, lm_head_hash=name)
    return Publication(_announced_part(policy, tensors), _announced_part(whole, tensors))


def _announced_part(manifest: Manifest, tensors: Mapping[str, NamedTensor]) -> Announced:
    held = []
    for number, layout in enumerate(layouts_of(manifest)):
        first = _rows(layout).start * math.prod(layout.shape[1:])
        held.append(HeldTensor(number, first, tensors[layout.name]))
    return check_share(manifest, held, senders_of_ranks())


def _room_of_each_rank(
    nbytes: int, config: PolicyTrainerConfig, make_room: Callable[[], None] | None
) -> memoryview:
    """Bytes for this rank's rows; empty for a rank without rows. Collective."""
    room, fault = memoryview(b""), ""
    try:
        if nbytes:
            room = _room(nbytes, config, make_room)
    except ResourceExhausted as error:
        fault = str(error)
    if fault := next(filter(None, process.from_all_ranks(fault)), ""):
        raise ResourceExhausted(f"no room for what is published: {fault}", seen=nbytes)
    return room


def _room(
    nbytes: int, config: PolicyTrainerConfig, make_room: Callable[[], None] | None
) -> memoryview:
    try:
        return room_for(nbytes, config.checkpoints_dir)
    except ResourceExhausted as error:
        if make_room is None:
            raise
        _log.warning("room_made_for_publication", error=str(error))
    make_room()
    return room_for(nbytes, config.checkpoints_dir)


async def pull_served(own: Manifest, config: PolicyTrainerConfig) -> list[NamedTensor] | None:
    """The tensors of this version that the gateway serves. None if it serves another version, or
    exactly these bits. Raises the gateway's PacelineErrors.
    """

    def differs(served: Manifest) -> bool:
        return (
            served.version == own.version
            and bool(served.tensors)
            and served.content_hash != own.content_hash
        )

    async with channel(config.addresses.gateway, config.security) as peer:
        await wait_ready(peer, patient(CONNECT_S))
        return await pull_weights(
            peer,
            WEIGHT_TARGET_POLICY,
            differs,
            deadline_s=patient(push_deadline_s(own.total_bytes)),
            directory=config.checkpoints_dir,
        )


def check_same_model(own: Sequence[TensorLayout], served: Sequence[NamedTensor]) -> None:
    """Raises DataLoss when the served tensors differ from the trained tensors in name, type or
    shape.
    """
    odd = sorted({str(one.layout) for one in served} ^ {str(one) for one in own})
    if odd:
        message = "another model serves than is trained"
        raise DataLoss(message, seen=odd[:4], allowed="the same tensors")


@torch.no_grad()
def adopt_served(
    tensors: Iterable[tuple[str, Tensor]],
    served: Mapping[str, NamedTensor] | None,
    config: PolicyTrainerConfig,
) -> None:
    """Changes sharded fp32 weights so that they publish as rank 0's `served`; numbers that already
    publish so stay. `served` is None on the other ranks. Collective; one whole tensor at a time is
    in the CPU memory of each rank.
    """
    dtype = getattr(torch, config.publish_dtype)
    word = _WORDS[dtype]
    for name, tensor in tensors:
        whole = torch.empty(tensor.shape, dtype=word)
        if served is not None:
            whole = torch.frombuffer(served[name].view, dtype=word).view(tensor.shape)
        dist.broadcast(whole.view(torch.uint8), 0)  # gloo has no 16-bit words
        own = shards.local_of(tensor)
        bits = shards.local_rows(whole, tensor).to(own.device)
        same = own.to(dtype).view(word) == bits
        own.copy_(torch.where(same, own, bits.view(dtype).to(own.dtype)))


class Publisher:
    """The publisher of one rank, for all versions. It keeps this rank's rows of a version until the
    next push. Pushes are collective.
    """

    def __init__(self, config: PolicyTrainerConfig, runner: asyncio.Runner) -> None:
        self._config = config
        self._runner = runner
        self._senders = senders_of_ranks()
        self._sender = WeightSender(config.publish_deltas, self._senders)

    def forget(self) -> None:
        """Frees the space of the last pushed version; the next push sends whole weights."""
        self._sender.forget()

    def push(self, publication: Publication, context: trajectory_pb2.CommandContext) -> PushReport:
        """Prepares the version at the gateway and, at the same time, its head at the drafter
        trainer if that service answers. Without the head the drafter cannot learn from this
        version's rows. Collective.

        Returns the gateway's report; its push_s covers the slower push of the two. Raises the
        gateway's PacelineErrors on all ranks.
        """
        started_s = time.monotonic()
        both = [publication.head] * self._config.push_head + [publication.policy]
        going: list[Parcel | PushReport] = [self._sender.plan(one) for one in both]
        while parcels := [one for one in going if isinstance(one, Parcel)]:
            own = self._runner.run(self._deliver(parcels, context))
            of_ranks = self._senders.exchange([_to_object(one) for one in own])
            # The head first, before the gateway's error is raised.
            settled = [
                self._settled(parcel, [*map(_from_object, delivered)])
                for parcel, *delivered in zip(parcels, *of_ranks, strict=True)
            ]
            going = [settled.pop(0) if isinstance(one, Parcel) else one for one in going]
        report = going[-1]
        assert isinstance(report, PushReport)
        return replace(report, push_s=time.monotonic() - started_s)

    def _settled(self, parcel: Parcel, outcomes: list[Outcome]) -> Parcel | PushReport:
        """The rest of a parcel that is still to be delivered, or its report. A step never fails
        because the drafter trainer does not answer.
        """
        try:
            return self._sender.settle(parcel, outcomes)
        except PacelineError as error:
            if parcel.manifest.target != WEIGHT_TARGET_POLICY_HEAD:
                raise
            # else the sender would keep a version that no other service needs
            self._sender.forget(WEIGHT_TARGET_POLICY_HEAD)
            if self._senders.rank == 0:
                HEADS_LEFT_OUT.record()
                version = parcel.manifest.version
                _log.warning("head_not_pushed", version=version, error=str(error))
            return PushReport(0, 0.0)

    async def _deliver(
        self, parcels: Sequence[Parcel], context: trajectory_pb2.CommandContext
    ) -> list[Outcome]:
        return await asyncio.gather(*(self._deliver_one(one, context) for one in parcels))

    async def _deliver_one(self, parcel: Parcel, context: trajectory_pb2.CommandContext) -> Outcome:
        addresses = self._config.addresses
        is_head = parcel.manifest.target == WEIGHT_TARGET_POLICY_HEAD
        deadline_s = patient(push_deadline_s(parcel.whole.manifest.total_bytes))
        address = addresses.drafter_trainer if is_head else addresses.gateway
        try:
            async with channel(address, self._config.security) as peer:
                if is_head:
                    stub: Any = weights_pb2_grpc.WeightServiceStub(peer)
                    with rpc_errors():  # a hanging peer costs only this deadline
                        await stub.GetVersions(GetVersionsRequest(), timeout=patient(CONNECT_S))
                else:
                    await wait_ready(peer, patient(CONNECT_S))
                return await self._sender.deliver(peer, parcel, context, deadline_s)
        except PacelineError as error:
            return error


def _to_object(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, PacelineError):
        return {"failed": asdict(Failed.of(0, outcome))}
    return {"report": asdict(outcome)}


def _from_object(plain: Mapping[str, Any]) -> Outcome:
    if "failed" in plain:
        return Failed(**plain["failed"]).error()
    return PushReport(**plain["report"])
