"""Pushes versions one after the other, each as a delta to the last where that is less work; alone,
or as one of several senders who bring a version together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import grpc

from paceline.errors import PacelineError, WeightsError
from paceline.telemetry import get_logger
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import Manifest
from paceline.weights.announcing import delta_manifest
from paceline.weights.delta import (
    DELTA_DAMAGED,
    MOST_SHARE,
    encode_delta,
    sampled_changes,
)
from paceline.weights.handover import ScratchFile
from paceline.weights.manifest import layouts, target_name
from paceline.weights.metrics import DELTAS_LEFT
from paceline.weights.push import DAMAGED_TRIES, PushReport, push_deadline_s, push_stream
from paceline.weights.rebuild import DELTA_BASE
from paceline.weights.shares import ALONE, Announced, CheckedRange, Senders, cut_ranges

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
class Parcel:
    """One version as it is to travel: what of its stream this sender brings."""

    manifest: Manifest
    ranges: tuple[CheckedRange, ...]
    whole: Announced = field(repr=False)
    encode_s: float
    rounds: int = 0  # that ended without the version being complete

    @property
    def is_delta(self) -> bool:
        """Whether the stream stands for the content, and is not it."""
        return self.manifest is not self.whole.manifest

    @property
    def file(self) -> ScratchFile | None:
        """Where the stream lies in the sender's file, all of it; a delta lies in memory."""
        return None if self.is_delta else self.whole.share.file

    def entire(self) -> Parcel:
        """The same version as a full push."""
        whole = self.whole
        return Parcel(whole.manifest, whole.share.ranges, whole, self.encode_s)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one sender's part of a parcel has arrived."""

    report: PushReport
    error: PacelineError | None = None


def delta_s(nbytes: int, share: float) -> float:
    """Seconds that a delta to so many bytes takes but for its way, by the share of elements that
    changed.
    """
    return FIXED_S + nbytes * (EACH_BYTE_S + share * EACH_CHANGED_BYTE_S)


class WeightSender:
    """Keeps, of each target, what it has pushed last, as long as that is the base of the next: its
    bytes must stay as they are.

    What the receiver then lacks it says, and the version goes whole: after an abort, after a
    restart of either side, when the base has rotted. Several senders take the same three steps:
    `plan` together, `deliver` each what it holds, and `settle` over what all have delivered, until
    it says how the push went.
    """

    def __init__(self, deltas: Deltas = "auto", senders: Senders = ALONE) -> None:
        """`auto`: a delta where it is less work than a full push, by how long the last of those
        took; `always`: wherever there is a base; `never`: nothing is kept.
        """
        self._deltas = deltas
        self._senders = senders
        self._bases: dict[int, Announced] = {}
        self._full_s: dict[int, float] = {}  # of a byte, as the last full push went

    async def push(
        self,
        channel: grpc.aio.Channel,
        whole: Announced,
        context: CommandContext,
        *,
        deadline_s: float | None = None,
    ) -> PushReport:
        """Pushes a version of which this sender holds all. Called again after a failure it sends
        only the rest. Raises as push_weights does.
        """
        started_s, nbytes = time.monotonic(), whole.manifest.total_bytes
        deadline_s = push_deadline_s(nbytes) if deadline_s is None else deadline_s
        going: Parcel | PushReport = await asyncio.to_thread(self.plan, whole)
        while isinstance(going, Parcel):
            left_s = deadline_s - (time.monotonic() - started_s)
            going = self.settle(going, [await self.deliver(channel, going, context, left_s)])
        return replace(going, push_s=time.monotonic() - started_s)

    def plan(self, whole: Announced) -> Parcel:
        """How a version travels. Collective."""
        started_s = time.monotonic()
        delta = self._delta(whole)
        encode_s = time.monotonic() - started_s
        if delta is None:
            return Parcel(whole.manifest, whole.share.ranges, whole, encode_s)
        return Parcel(*delta, whole, encode_s)

    async def deliver(
        self, channel: grpc.aio.Channel, parcel: Parcel, context: CommandContext, deadline_s: float
    ) -> Delivery:
        """Brings this sender's part of it to the receiver."""
        manifest = parcel.manifest
        cut = partial(cut_ranges, manifest, parcel.ranges)
        try:
            report = await push_stream(
                channel, manifest, cut, context, deadline_s=deadline_s, file=parcel.file
            )
        except PacelineError as error:
            return Delivery(PushReport(0, 0.0), error)
        return Delivery(report)

    def settle(self, parcel: Parcel, deliveries: Sequence[Delivery]) -> Parcel | PushReport:
        """The push as a whole when the version is complete; else what is to be delivered now.

        Raises what one of the senders met, and WeightsError when the version does not become
        complete.
        """
        refused = self._refusal(parcel, deliveries)
        if refused:
            return parcel.entire()
        whole, target = parcel.whole, parcel.manifest.target
        if all(one.report.missing for one in deliveries):  # the receiver has lost some of it
            if parcel.rounds + 1 < DAMAGED_TRIES:
                return replace(parcel, rounds=parcel.rounds + 1)
            name, missing = _name(parcel.manifest), deliveries[0].report.missing
            raise WeightsError(f"{name} misses chunks", seen=missing, allowed=0)
        report = joined_report([one.report for one in deliveries])
        if report.bytes and not parcel.is_delta:
            self._full_s[target] = report.transfer_s / report.bytes
        if self._deltas != "never":
            self._bases[target] = whole
        return replace(report, encode_s=parcel.encode_s)

    def forget(self, target: int | None = None) -> None:
        """Lets go of the base of a target, or of all: the next version goes whole."""
        for one in [*self._bases] if target is None else [target]:
            self._bases.pop(one, None)

    def _delta(self, whole: Announced) -> tuple[Manifest, tuple[CheckedRange, ...]] | None:
        """Manifest of a delta, and what this sender brings of it; None where somebody has no base,
        or it is more work than a full push.
        """
        manifest, base = whole.manifest, self._base_that_pays(whole)
        if base is None:
            return None
        tensors, limit = whole.share.tensors, int(manifest.total_bytes * MOST_BYTES)
        places = [(one.number, one.first) for one in whole.share.held]
        encoded = encode_delta(base.share.tensors, tensors, limit=limit, places=places)
        sizes = self._senders.exchange(None if encoded is None else len(encoded.stream))
        if encoded is None or None in sizes or sum(sizes) > limit:
            self._left(manifest, "changed")
            return None
        return delta_manifest(manifest, base.manifest, encoded.stream, self._senders)

    def _base_that_pays(self, whole: Announced) -> Announced | None:
        """What was pushed last, where all senders have it, of the same tensors, and so little has
        changed since that a delta is less work than a full push.
        """
        if self._deltas == "never":
            return None
        manifest = whole.manifest
        base = self._bases.get(manifest.target)
        own = None
        if (
            base is not None
            and base.manifest.version != manifest.version
            and layouts(base.manifest) == layouts(manifest)
        ):
            own = sampled_changes(base.share.tensors, whole.share.tensors)
        looks = self._senders.exchange([own, self._full_s.get(manifest.target)])
        if any(look is None for look, _ in looks):
            return None
        share = sum(look[0] for look, _ in looks) / max(1, sum(look[1] for look, _ in looks))
        full_s, nbytes = looks[0][1], manifest.total_bytes
        if share <= MOST_SHARE and (
            self._deltas == "always" or full_s is None or delta_s(nbytes, share) < full_s * nbytes
        ):
            return base
        self._left(manifest, "changed")
        return None

    def _refusal(self, parcel: Parcel, deliveries: Sequence[Delivery]) -> bool:
        """Whether the receiver cannot make the version of a delta. Raises any other error."""
        errors = [one.error for one in deliveries if one.error is not None]
        refusals = [one for one in errors if parcel.is_delta and one.reason in _REASONS]
        if not refusals:
            if errors:
                raise errors[0]
            return False
        # Others may have met that their version was forgotten for it.
        self._left(parcel.manifest, _REASONS[refusals[0].reason])
        _log.warning("delta_refused", version=_name(parcel.manifest), error=str(refusals[0]))
        return True

    def _left(self, manifest: Manifest, reason: str) -> None:
        if self._senders.rank == 0:  # one count of all
            DELTAS_LEFT.record(target=target_name(manifest.target), reason=reason)


def joined_report(reports: Sequence[PushReport]) -> PushReport:
    """One push of which several senders tell."""
    return PushReport(
        bytes=sum(one.bytes for one in reports),
        push_s=max(one.push_s for one in reports),
        receive_s=max(one.receive_s for one in reports),
        spool_s=max(one.spool_s for one in reports),
        fan_out_s=max(one.fan_out_s for one in reports),
        encoding=reports[0].encoding,
        apply_s=max(one.apply_s for one in reports),
        replaced=any(one.replaced for one in reports),
        by_file=all(one.by_file or not one.bytes for one in reports),
    )


def _name(manifest: Manifest) -> str:
    return f"{target_name(manifest.target)} version {manifest.version}"
