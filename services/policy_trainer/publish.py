"""Brings weights to rank 0, and pushes them from there to the gateway and the drafter trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import DataLoss, PacelineError, ResourceExhausted
from paceline.local.patience import patient
from paceline.rpc import channel, rpc_errors, wait_ready
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.metrics import HEADS_LEFT_OUT
from paceline.telemetry import get_logger
from paceline.tensors import NamedTensor, TensorLayout, head_hash
from paceline.training.process import from_rank_zero
from paceline.training.streaming import gather_rows, scatter_rows
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY, WEIGHT_TARGET_POLICY_HEAD
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import GetVersionsRequest, Manifest
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights import PushReport, WeightSender, build_manifest, pull_weights
from paceline.weights.assembly import allocate_on_disk
from paceline.weights.push import push_deadline_s

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CONNECT_S = 5.0
_log = get_logger(__name__)
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@dataclass(frozen=True, slots=True)
class Publication:
    """One version, ready to be pushed."""

    version: int
    policy: tuple[NamedTensor, ...]  # what model.safetensors holds: no lm_head where it is tied
    head: tuple[NamedTensor, ...]  # embed_tokens and lm_head, also where they are one
    lm_head_hash: str


def gather_publication(
    version: int,
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    config: PolicyTrainerConfig,
    make_room: Callable[[], None] | None = None,
) -> Publication | None:
    """Serving-type tensors of the sharded weights, which come in the order of `shapes`, on rank 0;
    None on the others. Collective.

    They lie in a file without a name, so that rank 0 holds no more in memory than a piece. Raises
    ResourceExhausted on all ranks where that finds no room, nor after `make_room` on rank 0.
    """
    dtype = getattr(torch, config.publish_dtype)
    layouts = [TensorLayout(name, _NAMES[dtype], tuple(shape)) for name, shape in shapes.items()]
    buffer = _buffer_of_rank_zero(sum(one.nbytes for one in layouts), config, make_room)
    tensors, offset = {}, 0
    for (name, weight), layout in zip(weights, layouts, strict=True):
        assert name == layout.name, f"{name} comes in the place of {layout.name}"
        into = None
        if buffer is not None:
            data = buffer[offset : offset + layout.nbytes]
            tensors[name] = NamedTensor(name, layout.dtype, layout.shape, data)
            into = torch.frombuffer(data, dtype=dtype).view(layout.shape)
            offset += layout.nbytes
        gather_rows(weight, dtype, into)
    return _publication(version, tensors) if buffer is not None else None


def _buffer_of_rank_zero(
    nbytes: int, config: PolicyTrainerConfig, make_room: Callable[[], None] | None
) -> memoryview | None:
    buffer, fault = None, ""
    if dist.get_rank() == 0:
        try:
            buffer = _buffer(nbytes, config, make_room)
        except ResourceExhausted as error:
            fault = str(error)
    if fault := from_rank_zero(fault):
        raise ResourceExhausted(f"no room for what is published: {fault}", seen=nbytes)
    return buffer


def _buffer(
    nbytes: int, config: PolicyTrainerConfig, make_room: Callable[[], None] | None
) -> memoryview:
    try:
        return allocate_on_disk(nbytes, config.checkpoints_dir)
    except ResourceExhausted as error:
        if make_room is None:
            raise
        _log.warning("room_made_for_publication", error=str(error))
    make_room()
    return allocate_on_disk(nbytes, config.checkpoints_dir)


def _publication(version: int, tensors: Mapping[str, NamedTensor]) -> Publication:
    embedding = tensors[EMBEDDING]
    head = tensors.get(HEAD) or NamedTensor(HEAD, embedding.dtype, embedding.shape, embedding.data)
    return Publication(version, tuple(tensors.values()), (embedding, head), head_hash(head.data))


async def push(
    publication: Publication,
    config: PolicyTrainerConfig,
    context: CommandContext,
    sender: WeightSender,
) -> PushReport:
    """Prepares the version at the gateway and, at the same time, its head at the drafter trainer if
    that is there: without the head it learns nothing from this version's rows. `sender` is the same
    for all versions; it keeps a publication until the next is pushed.

    The report is the gateway's; its push_s covers the slower of the two. Raises the gateway's
    PacelineErrors.
    """
    started_s = time.monotonic()
    head = asyncio.create_task(_push_head(publication, config, context, sender))
    try:
        manifest = _manifest(WEIGHT_TARGET_POLICY, publication, publication.policy)
        async with channel(config.addresses.gateway, config.security) as peer:
            await wait_ready(peer, _CONNECT_S)
            report = await sender.push(peer, manifest, publication.policy, context)
    finally:
        await head
    return replace(report, push_s=time.monotonic() - started_s)


async def _push_head(
    publication: Publication,
    config: PolicyTrainerConfig,
    context: CommandContext,
    sender: WeightSender,
) -> None:
    """Nothing where the drafter trainer does not answer: a step never fails because of it."""
    if not config.push_head:
        return
    try:
        manifest = _manifest(WEIGHT_TARGET_POLICY_HEAD, publication, publication.head)
        async with channel(config.addresses.drafter_trainer, config.security) as peer:
            stub: Any = WeightServiceStub(peer)
            with rpc_errors():  # one that hangs costs this deadline, not a push's
                await stub.GetVersions(GetVersionsRequest(), timeout=patient(_CONNECT_S))
            await sender.push(peer, manifest, publication.head, context)
    except PacelineError as error:
        sender.forget(WEIGHT_TARGET_POLICY_HEAD)  # it would keep a version that nobody else needs
        HEADS_LEFT_OUT.record()
        _log.warning("head_not_pushed", version=publication.version, error=str(error))


async def pull_served(
    publication: Publication, config: PolicyTrainerConfig
) -> list[NamedTensor] | None:
    """The tensors that the gateway serves as this version; None when it serves another version, or
    just these bits. Raises the gateway's PacelineErrors.
    """
    own = _manifest(WEIGHT_TARGET_POLICY, publication, publication.policy)

    def differs(served: Manifest) -> bool:
        return (
            served.version == own.version
            and bool(served.tensors)
            and served.content_hash != own.content_hash
        )

    async with channel(config.addresses.gateway, config.security) as peer:
        await wait_ready(peer, _CONNECT_S)
        return await pull_weights(
            peer,
            WEIGHT_TARGET_POLICY,
            differs,
            deadline_s=push_deadline_s(own.total_bytes),
            directory=config.checkpoints_dir,
        )


def check_same_model(own: Sequence[NamedTensor], served: Sequence[NamedTensor]) -> None:
    """Raises DataLoss when the tensors that serve are not those that are trained."""
    odd = sorted({str(one.layout) for one in served} ^ {str(one.layout) for one in own})
    if odd:
        raise DataLoss(
            "another model serves than is trained", seen=odd[:4], allowed="the same tensors"
        )


def take_served(
    tensors: Iterable[tuple[str, Tensor]],
    served: Mapping[str, NamedTensor] | None,
    config: PolicyTrainerConfig,
) -> None:
    """Makes sharded fp32 weights those that are published as rank 0's `served`: numbers that are
    published so already stay. Collective; None on the other ranks.
    """
    dtype = getattr(torch, config.publish_dtype)
    for name, tensor in tensors:
        whole = None
        if served is not None:
            whole = torch.frombuffer(served[name].view, dtype=dtype).view(tensor.shape)
        scatter_rows(whole, dtype, tensor, _merge)


def _merge(own: Tensor, served: Tensor) -> None:
    word = _WORDS[served.dtype]
    same = own.to(served.dtype).view(word) == served.view(word)
    own.copy_(torch.where(same, own, served.to(own.dtype)))


def _manifest(target: int, publication: Publication, tensors: Sequence[NamedTensor]) -> Manifest:
    return build_manifest(
        target, publication.version, tensors, lm_head_hash=publication.lm_head_hash
    )
