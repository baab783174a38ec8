"""Pushes weights from rank 0 to the gateway and the drafter trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.config import SecurityConfig
from paceline.rpc import channel, wait_ready
from paceline.tensors import NamedTensor, from_numpy, head_hash
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY, WEIGHT_TARGET_POLICY_HEAD
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import PushReport, build_manifest, push_weights
from policy_trainer.config import PolicyTrainerConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CONNECT_S = 5.0


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
    """Prepares the version at the gateway and, at the same time, its head at the drafter trainer.

    The report is the gateway's; its push_s covers the slower of the two. Raises the receivers'
    PacelineErrors.
    """
    addresses = config.addresses
    receivers = [(addresses.gateway, WEIGHT_TARGET_POLICY, publication.policy)]
    if config.push_head:
        receivers.append((addresses.drafter_trainer, WEIGHT_TARGET_POLICY_HEAD, publication.head))
    started_s = time.monotonic()
    reports = await asyncio.gather(
        *(
            _push_to(where, config.security, target, publication, tensors, context)
            for where, target, tensors in receivers
        ),
        return_exceptions=True,  # a push that succeeds is not thrown away with one that fails
    )
    done = [report for report in reports if isinstance(report, PushReport)]
    for report in reports:
        if isinstance(report, BaseException):
            raise report
    return replace(done[0], push_s=time.monotonic() - started_s)


async def _push_to(
    address: str,
    security: SecurityConfig,
    target: int,
    publication: Publication,
    tensors: Sequence[NamedTensor],
    context: CommandContext,
) -> PushReport:
    manifest = build_manifest(
        target, publication.version, tensors, lm_head_hash=publication.lm_head_hash
    )
    async with channel(address, security) as peer:
        await wait_ready(peer, _CONNECT_S)
        return await push_weights(peer, manifest, tensors, context)


def _named(name: str, tensor: Tensor, dtype: str) -> NamedTensor:
    if dtype == "bfloat16":
        return from_numpy(name, tensor.to(torch.bfloat16).view(torch.uint16).numpy(), "BF16")
    return from_numpy(name, tensor.to(torch.float32).numpy())
