"""Pushes weights from rank 0 to the gateway and the drafter trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataLoss, PacelineError
from paceline.local.patience import patient
from paceline.rpc import channel, rpc_errors, wait_ready
from paceline.telemetry import get_logger
from paceline.tensors import NamedTensor, from_numpy, head_hash
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY, WEIGHT_TARGET_POLICY_HEAD
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import GetVersionsRequest, Manifest
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights import PushReport, build_manifest, pull_weights, push_weights
from paceline.weights.push import push_deadline_s
from policy_trainer.config import PolicyTrainerConfig
from policy_trainer.metrics import HEADS_LEFT_OUT

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CONNECT_S = 5.0
_log = get_logger(__name__)
_DTYPES = {"F32": (torch.float32, torch.int32), "BF16": (torch.bfloat16, torch.int16)}


@dataclass(frozen=True, slots=True)
class Publication:
    """One version, ready to be pushed."""

    version: int
    policy: tuple[NamedTensor, ...]  # what model.safetensors holds: no lm_head where it is tied
    head: tuple[NamedTensor, ...]  # embed_tokens and lm_head, also where they are one
    lm_head_hash: str


def make_publication(version: int, weights: dict[str, Tensor], dtype: str) -> Publication:
    """Serving-type tensors of whole fp32 weights, sorted by name."""
    tensors = {name: _named(name, weights[name], dtype) for name in sorted(weights)}
    embedding = tensors[EMBEDDING]
    head = tensors.get(HEAD) or NamedTensor(HEAD, embedding.dtype, embedding.shape, embedding.data)
    return Publication(version, tuple(tensors.values()), (embedding, head), head_hash(head.data))


async def push(
    publication: Publication, config: PolicyTrainerConfig, context: CommandContext
) -> PushReport:
    """Prepares the version at the gateway and, at the same time, its head at the drafter trainer if
    that is there: without the head it learns nothing from this version's rows.

    The report is the gateway's; its push_s covers the slower of the two. Raises the gateway's
    PacelineErrors.
    """
    started_s = time.monotonic()
    head = asyncio.create_task(_push_head(publication, config, context))
    try:
        manifest = _manifest(WEIGHT_TARGET_POLICY, publication, publication.policy)
        async with channel(config.addresses.gateway, config.security) as peer:
            await wait_ready(peer, _CONNECT_S)
            report = await push_weights(peer, manifest, publication.policy, context)
    finally:
        await head
    return replace(report, push_s=time.monotonic() - started_s)


async def _push_head(
    publication: Publication, config: PolicyTrainerConfig, context: CommandContext
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
            await push_weights(peer, manifest, publication.head, context)
    except PacelineError as error:
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
        )


def merged(own: dict[str, Tensor], served: Sequence[NamedTensor]) -> dict[str, Tensor]:
    """fp32 weights that are published as `served`: `own`, but for the numbers that are not.

    Raises DataLoss when the tensors are not those of `own`.
    """
    named = {tensor.name: tensor for tensor in served}
    seen = {name: tensor.shape for name, tensor in named.items()}
    allowed = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if seen != allowed:
        odd = sorted(set(seen.items()) ^ set(allowed.items()))[:4]
        raise DataLoss("another model serves than is trained", seen=odd, allowed="the same tensors")
    return {name: _merged(tensor, named[name]) for name, tensor in own.items()}


def _merged(own: Tensor, served: NamedTensor) -> Tensor:
    dtype, word = _DTYPES[served.dtype]
    there = torch.frombuffer(bytearray(served.view), dtype=dtype).view(own.shape)
    return torch.where(own.to(dtype).view(word) == there.view(word), own, there.to(own.dtype))


def _manifest(target: int, publication: Publication, tensors: Sequence[NamedTensor]) -> Manifest:
    return build_manifest(
        target, publication.version, tensors, lm_head_hash=publication.lm_head_hash
    )


def _named(name: str, tensor: Tensor, dtype: str) -> NamedTensor:
    if dtype == "bfloat16":
        return from_numpy(name, tensor.to(torch.bfloat16).view(torch.uint16).numpy(), "BF16")
    return from_numpy(name, tensor.to(torch.float32).numpy())
