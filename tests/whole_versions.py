"""Versions of weights that one sender holds as a whole, and their pushes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from paceline.tensors import NamedTensor
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import Manifest
from paceline.weights import Parcel, PushReport, WeightSender, push
from paceline.weights.manifest import unchecked_manifest
from paceline.weights.shares import Announced, check_share, held_whole


def announced(
    target: int, version: int, tensors: Sequence[NamedTensor], **options: Any
) -> Announced:
    """A version with its checksums; `options` of unchecked_manifest."""
    layouts = [one.layout for one in tensors]
    manifest = unchecked_manifest(target, version, layouts, **options)
    return check_share(manifest, held_whole(tensors))


def build_manifest(
    target: int, version: int, tensors: Sequence[NamedTensor], **options: Any
) -> Manifest:
    """The manifest of a version."""
    return announced(target, version, tensors, **options).manifest


async def push_weights(
    channel: grpc.aio.Channel,
    manifest: Manifest,
    tensors: Sequence[NamedTensor],
    context: CommandContext,
    *,
    deadline_s: float | None = None,
) -> PushReport:
    """Pushes tensors under a manifest, which may be another content's."""
    plain = unchecked_manifest(
        manifest.target,
        manifest.version,
        [one.layout for one in tensors],
        chunk_bytes=manifest.chunk_bytes,
    )
    whole = check_share(plain, held_whole(tensors))._replace(manifest=manifest)
    return await push.push_weights(channel, whole, context, deadline_s=deadline_s)


async def push_alone(
    sender: WeightSender,
    channel: grpc.aio.Channel,
    whole: Announced,
    context: CommandContext,
    deadline_s: float = 30.0,
) -> PushReport:
    """Plan, deliver and settle until the version is complete."""
    going: Parcel | PushReport = sender.plan(whole)
    while isinstance(going, Parcel):
        going = sender.settle(going, [await sender.deliver(channel, going, context, deadline_s)])
    return going
