"""Builds a version from its base in the spool and a delta."""

from __future__ import annotations

from paceline.errors import DataLoss, NotFound, WeightsError
from paceline.v1.weights_pb2 import Manifest
from paceline.weights.delta import DELTA_DAMAGED, apply_delta
from paceline.weights.manifest import check_finite, layouts, target_name, views, whole_of
from paceline.weights.shares import checksums_of
from paceline.weights.spool import Spool

DELTA_BASE = "DELTA_BASE"
"""Error reason of a delta without its base in the spool."""


def check_base(spool: Spool, manifest: Manifest) -> None:
    """Raises WeightsError with reason DELTA_BASE unless the spool has the base of a delta, with the
    content and tensors that the delta requires.
    """
    target, version = manifest.target, manifest.base_version
    try:
        held = spool.manifest(target, version)
    except DataLoss as error:
        raise _not_here(spool, manifest, str(error)) from error
    if held is None:
        raise _not_here(spool, manifest, "not here")
    if held.content_hash != manifest.delta.base_hash:
        raise _not_here(spool, manifest, f"content {held.content_hash[:16]}")
    if layouts(held) != layouts(manifest):
        raise _not_here(spool, manifest, "other tensors")


def rebuilt(spool: Spool, manifest: Manifest, stream: memoryview) -> memoryview:
    """The content of the version behind a delta, in memory of its own, checked.

    Raises WeightsError with reason DELTA_BASE when the base is absent or damaged; DataLoss with
    reason DELTA_DAMAGED when the delta cannot be applied or yields another content than the
    manifest's; WeightsError when a number is not finite.
    """
    check_base(spool, manifest)
    content = spool.room_for(manifest.total_bytes)
    try:
        spool.read_content(manifest.target, manifest.base_version, content)
        check_finite(apply_delta(stream, views(manifest, content)))
        _check_result(manifest, content)
    except (DataLoss, NotFound) as error:
        _check_spooled_base(spool, manifest)
        raise error
    return content


def _check_result(manifest: Manifest, content: memoryview) -> None:
    whole = whole_of(manifest)
    seen = checksums_of(whole, views(whole, content))
    about = f"delta to {target_name(whole.target)} version {whole.version}"
    for spec, crc in zip(whole.tensors, seen.tensors, strict=True):
        if crc != spec.crc32:
            raise DataLoss(
                f"{about} gives another {spec.name}",
                reason=DELTA_DAMAGED,
                seen=f"{crc:#010x}",
                allowed=f"{spec.crc32:#010x}",
            )
    if seen.content_hash != whole.content_hash:
        raise DataLoss(
            f"{about} gives other content",
            reason=DELTA_DAMAGED,
            seen=seen.content_hash,
            allowed=whole.content_hash,
        )


def _check_spooled_base(spool: Spool, manifest: Manifest) -> None:
    """Checks the base's files. If they are damaged, raises for the base and records the damage in
    the spool.
    """
    try:
        spool.check(manifest.target, manifest.base_version)
    except DataLoss as error:
        raise _not_here(spool, manifest, str(error)) from error


def _not_here(spool: Spool, manifest: Manifest, fault: str) -> WeightsError:
    name = target_name(manifest.target)
    here = sorted(version for target, version in spool.spooled() if target == manifest.target)
    return WeightsError(
        f"base of a delta, {name} version {manifest.base_version} with content "
        f"{manifest.delta.base_hash[:16]}, cannot be used",
        reason=DELTA_BASE,
        seen=fault,
        allowed=f"{name} versions {here}",
    )
