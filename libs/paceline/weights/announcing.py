"""Announces versions: manifests with checksums, from one sender or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.tensors import NamedTensor
from paceline.v1.engine_pb2 import WeightTarget
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_SPARSE_DELTA, Manifest, SparseDelta
from paceline.weights.handover import ScratchFile
from paceline.weights.manifest import CHUNK_BYTES, first_not_finite, not_finite, unchecked_manifest
from paceline.weights.shares import (
    ALONE,
    Announced,
    CheckedRange,
    HeldTensor,
    Senders,
    Share,
    checked_ranges,
    facts_of,
    held_whole,
    joined_checksums,
    joined_stream_hash,
    share_of,
)


def build_manifest(
    target: WeightTarget | int,
    version: int,
    tensors: Sequence[NamedTensor],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    lm_head_hash: str = "",
    metadata: Mapping[str, str] | None = None,
) -> Manifest:
    """Manifest of a full push of `tensors` in this order. Reads every byte.

    Raises WeightsError when a number is not finite.
    """
    manifest = unchecked_manifest(
        target,
        version,
        [tensor.layout for tensor in tensors],
        chunk_bytes=chunk_bytes,
        lm_head_hash=lm_head_hash,
        metadata=metadata,
    )
    return check_share(manifest, held_whole(tensors)).manifest


def check_share(
    manifest: Manifest,
    held: Sequence[HeldTensor],
    senders: Senders = ALONE,
    file: ScratchFile | None = None,
) -> Announced:
    """This sender's share of a version. Completes the manifest with the checksums of all senders;
    each of them must call this. Reads every held byte. With `file`, all of the share is in that
    file.

    Raises WeightsError, at every sender, when a number is not finite; InvalidInput when the shares
    do not cover the version exactly.
    """
    odd = first_not_finite(one.tensor for one in held)
    share = share_of(manifest, held, file) if odd is None else Share((), ())
    shares = senders.exchange([odd, facts_of(share.ranges)])
    for name, _ in shares:
        if name is not None:
            raise not_finite(name)
    checksums = joined_checksums(manifest, [checked for _, checked in shares])
    manifest.content_hash = checksums.content_hash
    for spec, checksum in zip(manifest.tensors, checksums.tensors, strict=True):
        spec.crc32 = checksum
    return Announced(manifest, share)


def delta_manifest(
    whole: Manifest, base: Manifest, section: bytes, senders: Senders = ALONE
) -> tuple[Manifest, tuple[CheckedRange, ...]]:
    """The version `whole`, announced as a delta against `base`; both are full manifests. Its stream
    is the sections of all senders, by rank. Also returns this sender's part of the stream.
    """
    sizes = senders.exchange(len(section))
    manifest = Manifest()
    manifest.CopyFrom(whole)
    manifest.encoding = WEIGHT_ENCODING_SPARSE_DELTA
    manifest.base_version = base.version
    manifest.delta.CopyFrom(SparseDelta(nbytes=sum(sizes), base_hash=base.content_hash))
    start = sum(sizes[: senders.rank])
    ranges = checked_ranges(memoryview(section), start, manifest.chunk_bytes)
    shares = senders.exchange(facts_of(ranges))
    manifest.delta.stream_hash = joined_stream_hash(manifest, shares)
    return manifest, ranges
