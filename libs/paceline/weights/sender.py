"""Pushes versions one after the other, each as a delta to the last where that is less work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import grpc

from paceline.errors import DataLoss, WeightsError
from paceline.telemetry import get_logger
from paceline.tensors import NamedTensor
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import Manifest
from paceline.weights.chunks import cut_stream
from paceline.weights.delta import (
    DELTA_DAMAGED,
    MOST_SHARE,
    encode_delta,
    sampled_share,
)
from paceline.weights.manifest import delta_manifest, layouts, target_name
from paceline.weights.metrics import DELTAS_LEFT
from paceline.weights.push import PushReport, push_deadline_s, push_stream, push_weights
from paceline.weights.rebuild import DELTA_BASE

Deltas = Literal["auto", "always", "never"]
MOST_BYTES = 1 / 16
"""Share of the content that a delta may take; it is in memory as a whole."""
FIXED_S, EACH_BYTE_S, EACH_CHANGED_BYTE_S = 0.02, 1.0e-9, 30e-9
"""What a delta takes beside its own bytes on the wire: to compare, copy and check all bytes of the
content, and to encode and apply those of changed elements. Measured on about one core
(docs/benchmarks.md): with more, a delta is at times left that would have been a little faster.
"""
_REASONS = {DELTA_BASE: "base", DELTA_DAMAGED: "damaged"}
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Pushed:
    manifest: Manifest
    tensors: Sequence[NamedTensor]


def delta_s(nbytes: int, share: float) -> float:
    """Seconds that a delta to so many bytes takes but for its way, by the share of elements that
    changed.
    """
    return FIXED_S + nbytes * (EACH_BYTE_S + share * EACH_CHANGED_BYTE_S)


class WeightSender:
    """Keeps, of each target, the tensors that it has pushed last, as long as they are the base of
    the next: their bytes must stay as they are.

    What the receiver then lacks it says, and the version goes whole: after an abort, after a
    restart of either side, when the base has rotted.
    """

    def __init__(self, deltas: Deltas = "auto") -> None:
        """`auto`: a delta where it is less work than a full push, by how long the last of those
        took; `always`: wherever there is a base; `never`: nothing is kept.
        """
        self._deltas = deltas
        self._bases: dict[int, _Pushed] = {}
        self._full_s: dict[int, float] = {}  # of a byte, as the last full push went

    async def push(
        self,
        channel: grpc.aio.Channel,
        manifest: Manifest,
        tensors: Sequence[NamedTensor],
        context: CommandContext,
        *,
        deadline_s: float | None = None,
    ) -> PushReport:
        """Pushes a version, announced as full by `manifest`. Called again after a failure it sends
        only the rest. Raises as push_weights does.
        """
        started_s = time.monotonic()
        deadline_s = push_deadline_s(manifest.total_bytes) if deadline_s is None else deadline_s
        whole = _Pushed(manifest, tensors)
        delta = await asyncio.to_thread(self._delta, whole)
        encode_s = time.monotonic() - started_s
        report = None
        if delta is not None:
            report = await self._push_delta(channel, *delta, context, deadline_s - encode_s)
        if report is None:
            left_s = deadline_s - (time.monotonic() - started_s)
            report = await push_weights(channel, manifest, tensors, context, deadline_s=left_s)
            if report.bytes:
                self._full_s[manifest.target] = report.transfer_s / report.bytes
        if self._deltas != "never":
            self._bases[manifest.target] = whole
        return replace(report, encode_s=encode_s, push_s=time.monotonic() - started_s)

    def forget(self, target: int | None = None) -> None:
        """Lets go of the base of a target, or of all: the next version goes whole."""
        for one in [*self._bases] if target is None else [target]:
            self._bases.pop(one, None)

    def _delta(self, whole: _Pushed) -> tuple[Manifest, bytes] | None:
        """Manifest and stream of a delta; None where there is no base, or it is more work than a
        full push.
        """
        base = self._bases.get(whole.manifest.target)
        if base is None or base.manifest.version == whole.manifest.version:
            return None
        if layouts(base.manifest) != layouts(whole.manifest):
            return None
        encoded = None
        if self._pays(whole.manifest, sampled_share(base.tensors, whole.tensors)):
            limit = int(whole.manifest.total_bytes * MOST_BYTES)
            encoded = encode_delta(base.tensors, whole.tensors, limit=limit)
        if encoded is None:
            DELTAS_LEFT.record(target=target_name(whole.manifest.target), reason="changed")
            return None
        return delta_manifest(whole.manifest, base.manifest, encoded.stream), encoded.stream

    def _pays(self, manifest: Manifest, share: float) -> bool:
        """Whether a delta of so many changed elements is less work than a full push."""
        if share > MOST_SHARE:
            return False
        full_s = self._full_s.get(manifest.target)
        nbytes = manifest.total_bytes
        return (
            self._deltas == "always" or full_s is None or delta_s(nbytes, share) < full_s * nbytes
        )

    async def _push_delta(
        self,
        channel: grpc.aio.Channel,
        manifest: Manifest,
        stream: bytes,
        context: CommandContext,
        deadline_s: float,
    ) -> PushReport | None:
        """None when the receiver cannot make the version of it."""
        cut = partial(cut_stream, manifest, stream)
        try:
            return await push_stream(channel, manifest, cut, context, deadline_s=deadline_s)
        except (WeightsError, DataLoss) as error:
            if error.reason not in _REASONS:
                raise
            name = target_name(manifest.target)
            DELTAS_LEFT.record(target=name, reason=_REASONS[error.reason])
            _log.warning(
                "delta_refused", version=f"{name} version {manifest.version}", error=str(error)
            )
            return None
